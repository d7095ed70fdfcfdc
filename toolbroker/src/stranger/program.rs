//! Which program a command means, and which files it is made of: the file,
//! where its links lead, what interprets it, and the folder that it was
//! installed into with its libraries.
//!
//! Deliberately absent is following what a program loads when it runs.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Interpreters of interpreters.
const INTERPRETERS_MAX: usize = 4;
/// The first line of a script, in bytes.
const FIRST_LINE_BYTES_MAX: u64 = 512;

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

/// The files and folders that a program is made of.
pub(super) fn parts(program: &Path, home: Option<&Path>) -> Vec<PathBuf> {
    let mut parts = Vec::new();
    let mut next = Some(program.to_owned());
    for _ in 0..INTERPRETERS_MAX {
        let Some(path) = next else { break };
        parts.push(path.clone());
        parts.extend(installed_with(&path, home));
        if let Ok(file) = path.canonicalize()
            && file != path
        {
            parts.extend(installed_with(&file, home));
            parts.push(file);
        }
        next = interpreter(&path);
    }
    parts
}

/// The folder that a program was installed into, if it was one of several and
/// has libraries there.
fn installed_with(program: &Path, home: Option<&Path>) -> Option<PathBuf> {
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

/// What a script names in its first line.
fn interpreter(script: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    File::open(script).ok()?.take(FIRST_LINE_BYTES_MAX).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(|byte| *byte == b' ' || *byte == b'\t').filter(|it| !it.is_empty());
    let interpreter = Path::new(OsStr::from_bytes(words.next()?));
    if interpreter.file_name() != Some(OsStr::new("env")) {
        return Some(interpreter.to_owned());
    }
    let asked = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
    find(Path::new(OsStr::from_bytes(asked))).ok()
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
    fn a_script_is_made_of_its_environment_and_its_interpreters() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        made(&at, "versions/3/lib/x", "");
        let real = made(&at, "versions/3/bin/python3", "\x7fELF");
        made(&at, "venv/pyvenv.cfg", "");
        std::fs::create_dir_all(at.join("venv/bin")).unwrap();
        let python = at.join("venv/bin/python");
        std::os::unix::fs::symlink(&real, &python).unwrap();
        let script = made(&at, "venv/bin/server", &format!("#!{} -I\nx", python.display()));
        let parts = parts(&script, None);
        for needed in [script, at.join("venv"), python, real, at.join("versions/3")] {
            assert!(parts.contains(&needed), "{} of {parts:?}", needed.display());
        }
    }

    #[test]
    fn a_binary_beside_others_is_alone() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().canonicalize().unwrap();
        // Where cargo keeps its registry tokens.
        made(&home, ".cargo/credentials.toml", "");
        let tool = made(&home, ".cargo/bin/tool", "\x7fELF");
        assert_eq!(parts(&tool, Some(&home)), [tool]);
        let local = made(&home, ".local/bin/tool", "\x7fELF");
        assert_eq!(parts(&local, Some(&home)), [local, home.join(".local/lib")]);
        let own = made(&home, "bin/tool", "\x7fELF");
        std::fs::create_dir(home.join("lib")).unwrap();
        assert_eq!(parts(&own, Some(&home)), [own]);
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
