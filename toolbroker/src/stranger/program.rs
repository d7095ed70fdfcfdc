//! Which program a command means, and of a file that is one: what interprets
//! it, and the folder that it was installed into with its libraries.
//!
//! Deliberately absent is following what a program loads when it runs; and what
//! of all this a server is given, which is [`super::view`]'s.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::reach::{Seen, open_to_read};

/// What a script may ask `env` for, wherever the script lies, with or without a
/// version: what of the operator's `PATH` a server may choose to see by writing a script.
const INTERPRETERS: [&str; 14] = [
    "bash", "bun", "dash", "deno", "node", "nodejs", "perl", "php", "pypy", "python", "ruby", "sh",
    "uv", "zsh",
];
/// The first line of a script, in bytes, with its end: the kernel reads no more
/// (`BINPRM_BUF_SIZE`), and a shell may execute what that cannot.
const FIRST_LINE_BYTES_MAX: usize = 256;

/// The program that a command means: a path, or a name looked up in `PATH`.
///
/// # Errors
/// `NotFound`.
pub(super) fn find(command: &Path) -> io::Result<PathBuf> {
    let is_program = |path: &Path| {
        path.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
    };
    if command.as_os_str().as_bytes().contains(&b'/') {
        // Whether it may be executed is for the kernel to say.
        command.metadata()?;
        return Ok(command.to_owned());
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(command))
        .find(|path| is_program(path))
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The folder that a program was installed into, if it was one of several and
/// has libraries there.
pub(super) fn installed_with(program: &Path, home: Option<&Path>) -> Option<PathBuf> {
    let folder = program.parent()?;
    let name = folder.file_name()?;
    let installed = folder.parent()?;
    if !["bin", "sbin", ".bin", "shims", "libexec"].map(OsStr::new).contains(&name) {
        return None;
    }
    if let Some(home) = home {
        if home.starts_with(installed) {
            return None;
        }
        // Where keys and histories are, too.
        if installed == home.join(".local") {
            return Some(installed.join("lib"));
        }
    }
    let has = |mark: &str| installed.join(mark).exists();
    let is_modules = installed.file_name() == Some(OsStr::new("node_modules"));
    (is_modules || has("pyvenv.cfg") || has("lib") || has("libexec")).then(|| installed.to_owned())
}

/// The first bytes of a file, at most so many. Of a pipe there are none, and nobody
/// waits for some: a server may have put one where it may write.
fn beginning(opened: io::Result<File>, bytes_max: usize) -> Option<Vec<u8>> {
    let opened = opened.ok()?;
    let mut start = Vec::new();
    let is_file = opened.metadata().is_ok_and(|it| it.is_file());
    (is_file && opened.take(bytes_max as u64).read_to_end(&mut start).is_ok()).then_some(start)
}

/// Whether a file begins as what the kernel executes. Its path has no links.
pub(super) fn begins_as_program(file: &Path) -> bool {
    beginning(open_to_read(file), 4)
        .is_some_and(|it| it.starts_with(b"#!") || it.starts_with(b"\x7fELF"))
}

/// What is to interpret a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interpreter {
    pub(super) path: PathBuf,
    /// Whether the script names no file, but asks for what everybody has: which file
    /// that is `PATH` says, which is the operator's.
    pub(super) is_common: bool,
}

/// What a script names in its first line, and only if it is what executes the script:
/// a server that may write its own text would be given whatever else it names there.
pub(super) fn interpreter(script: &Seen) -> Option<Interpreter> {
    let start = beginning(script.open_to_read(), FIRST_LINE_BYTES_MAX)?;
    let line = match start.iter().position(|byte| *byte == b'\n') {
        Some(end) => &start[..end],
        None if start.len() < FIRST_LINE_BYTES_MAX => &start[..],
        None => return None,
    };
    let line = line.strip_prefix(b"#!")?;
    let mut words = line.split(|byte| *byte == b' ' || *byte == b'\t').filter(|it| !it.is_empty());
    let interpreter = Path::new(OsStr::from_bytes(words.next()?));
    let (path, is_common) = if interpreter.file_name() == Some(OsStr::new("env")) {
        let asked = asked_of_env(words)?;
        (find(Path::new(OsStr::from_bytes(asked))).ok()?, is_common(asked))
    } else {
        (interpreter.to_owned(), false)
    };
    path.canonicalize()
        .is_ok_and(|it| begins_as_program(&it))
        .then_some(Interpreter { path, is_common })
}

/// Whether a name is an interpreter's, whatever its version.
fn is_common(name: &[u8]) -> bool {
    let end =
        name.iter().rposition(|it| !it.is_ascii_digit() && *it != b'.').map_or(0, |at| at + 1);
    INTERPRETERS.iter().any(|it| it.as_bytes() == &name[..end])
}

/// The program that `env` is to execute, where it is plain which: of options it has
/// `-S` alone, and no word is one that `env` would take apart otherwise.
fn asked_of_env<'w>(words: impl Iterator<Item = &'w [u8]>) -> Option<&'w [u8]> {
    let is_plain = |it: &u8| it.is_ascii_graphic() && !b"\\\"'$#".contains(it);
    for (at, word) in words.enumerate() {
        if !word.iter().all(is_plain) {
            return None;
        }
        match word {
            b"-S" if at == 0 => {}
            [b'-', ..] => return None,
            word if word.contains(&b'=') => {}
            word => return Some(word),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(at: &Path, path: &str, text: &str) -> PathBuf {
        let path = at.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn a_first_line_names_nothing_but_what_executes_the_script() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        let own = made(&at, "tool", "\x7fELF").display().to_string();
        let other = made(&at, "bin/other", "#!/bin/sh").display().to_string();
        let key = made(&at, "key", "a secret").display().to_string();
        let split = made(&at, "a\\_/key", "#!/bin/sh").display().to_string();
        let home = at.display();
        let of = |line: &str| {
            let script = Seen::at(&made(&at, "script", line)).unwrap();
            interpreter(&script).map(|it| it.path)
        };
        for line in [
            format!("#!{own}"),
            format!("#! \t{own} -x\n"),
            format!("#!/usr/bin/env {own}\n"),
            format!("#!/usr/bin/env -S A=1 {own} run --script\n"),
        ] {
            assert_eq!(of(&line), Some(own.clone().into()), "{line}");
        }
        for line in [
            format!("#!{key}\n"),
            format!("#!{home}\n"),
            format!("#!{}{own}\n", "/".repeat(FIRST_LINE_BYTES_MAX)),
            format!("#!{own} {}\n", "x".repeat(FIRST_LINE_BYTES_MAX)),
            format!("#!/usr/bin/env -S -u {home} /bin/sh\n"),
            format!("#!/usr/bin/env -S -u {other} /bin/sh\n"),
            format!("#!/usr/bin/env -Ssh {other}\n"),
            format!("#!/usr/bin/env -S A=1\\_sh {other}\n"),
            format!("#!/usr/bin/env -S A=\"1 {other}\" sh\n"),
            format!("#!/usr/bin/env -S sh\u{b}{other}\n"),
            format!("#!/usr/bin/env -S {split}\n"),
        ] {
            assert_eq!(of(&line), None, "{line}");
        }
    }

    #[test]
    fn nobody_waits_for_a_pipe_that_stands_where_a_program_stood() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("server");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let pipe = pipe.canonicalize().unwrap();
        assert!(!begins_as_program(&pipe));
        assert_eq!(interpreter(&Seen::at(&pipe).unwrap()), None);
    }

    #[test]
    fn a_binary_beside_others_is_alone() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().canonicalize().unwrap();
        // Where cargo keeps its registry tokens.
        made(&home, ".cargo/credentials.toml", "");
        std::fs::create_dir(home.join("lib")).unwrap();
        for (tool, with) in [
            (".cargo/bin/tool", None),
            (".local/bin/tool", Some(home.join(".local/lib"))),
            ("bin/tool", None),
        ] {
            assert_eq!(installed_with(&home.join(tool), Some(&home)), with, "{tool}");
        }
    }

    #[test]
    fn only_an_interpreter_that_everybody_has_is_common() {
        for name in ["node", "python3.12", "python", "sh", "php8"] {
            assert!(is_common(name.as_bytes()), "{name}");
        }
        for name in ["", "3.12", "/bin/sh", "../node", "vault", "node-x", "xpython"] {
            assert!(!is_common(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn a_program_that_is_not_there_is_not_found() {
        for command in ["/nonexistent/server", "no-such-program-anywhere"] {
            let error = find(Path::new(command)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
        }
        assert!(find(Path::new("sh")).unwrap().is_absolute());
    }
}
