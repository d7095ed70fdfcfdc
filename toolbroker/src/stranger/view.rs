//! What one tool server may see of the host's files: the system's, its own
//! program's, and what the operator grants.
//!
//! Paths are resolved here once, link by link; what is built of them follows
//! none. Deliberately absent is guessing from a program's name what it might
//! want: `docs/tool-servers.md` says what to grant to which kind.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use super::program;
use super::reach::{Identity, Seen};

/// What every server may read, where it exists.
const SYSTEM: [&str; 12] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/opt",
    "/nix",
    "/gnu",
    "/run/current-system",
];
/// Files of the system that others of it link to from elsewhere.
const SYSTEM_LINKS: [&str; 2] = ["/etc/resolv.conf", "/etc/localtime"];
/// Never granted as a whole: they are the host, or are not files.
const NEVER: [&str; 6] = ["/", "/proc", "/sys", "/dev", "/run", "/boot"];
/// What is no file of the host's, wherever it is.
const KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];
/// Interpreters of interpreters.
const INTERPRETERS_MAX: usize = 4;
/// Links followed on the way to one file.
const LINKS_MAX: usize = 40;
/// What ends in one of these is a program's text: data beside it belongs to
/// it, and nobody writes to it, unless it lies in a folder that is given to write.
const CODE: [&str; 14] =
    ["js", "mjs", "cjs", "ts", "mts", "py", "pyz", "rb", "php", "pl", "sh", "jar", "dll", "wasm"];
/// What stands in the folder of a project.
const PROJECT: [&str; 5] =
    ["package.json", "pyproject.toml", "node_modules", "Gemfile", "composer.json"];
/// Folders in which those of many lie beside each other (FHS 3.0).
const SHARED: [&str; 7] = ["/home", "/media", "/mnt", "/srv", "/tmp", "/var", "/var/tmp"];
/// How far above a program's text its project may begin.
const PROJECT_LEVELS_MAX: usize = 6;

/// Paths by what may be done there, all absolute and without links.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    pub(super) system: BTreeSet<PathBuf>,
    pub(super) read: BTreeSet<PathBuf>,
    pub(super) write: BTreeSet<PathBuf>,
    pub(super) links: BTreeMap<PathBuf, PathBuf>,
    /// What each of them was when it was granted.
    seen: BTreeMap<PathBuf, Identity>,
    /// All that any server may write, before it is granted: where a link in there leads,
    /// and what a script in there names, is a server's own choice.
    own: BTreeSet<PathBuf>,
}

/// Where a path leads.
struct Reached {
    seen: Seen,
    links: BTreeMap<PathBuf, PathBuf>,
    /// Of what servers may write, all in which a link on the way lies.
    chosen_in: BTreeSet<PathBuf>,
}

/// What is to be done with a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl View {
    /// The system's files.
    pub(super) fn of_system() -> Self {
        let mut view = Self::default();
        for path in SYSTEM.iter().chain(&SYSTEM_LINKS) {
            if let Ok(path) = resolve(Path::new(path), &mut view.links)
                && !NEVER.iter().any(|never| path == Path::new(never))
                && !view.system.iter().any(|shown| path.starts_with(shown))
            {
                view.system.insert(path);
            }
        }
        view
    }

    /// Grants nothing more by links and scripts that lie in what these lead to, but what
    /// lies in there too, or may be used anyway: a server could put others in their
    /// place, and it, or another, would be given what it chose at its next start.
    pub(super) fn distrust<'a>(&mut self, paths: impl IntoIterator<Item = &'a Path>) {
        self.own.extend(paths.into_iter().filter_map(|path| path.canonicalize().ok()));
    }

    /// The same of what words of a command line name.
    pub(super) fn distrust_named(&mut self, words: &[String], cwd: &Path) {
        let named: Vec<PathBuf> =
            words.iter().filter_map(|word| Some(named(word, cwd)?.0)).collect();
        self.distrust(named.iter().map(PathBuf::as_path));
    }

    /// Whether a path can be granted at all.
    pub(super) fn may_be_granted(path: &Path) -> bool {
        path.is_absolute() && !NEVER.iter().any(|never| path == Path::new(never))
    }

    /// Grants reading, where that is something new.
    pub(super) fn add_read(&mut self, path: &Path) -> io::Result<()> {
        let path = self.resolved(path, Access::Read)?;
        if !self.system.iter().chain(&self.read).any(|shown| path.starts_with(shown)) {
            self.read.insert(path);
        }
        Ok(())
    }

    /// Grants writing.
    pub(super) fn add_write(&mut self, path: &Path) -> io::Result<()> {
        let path = self.resolved(path, Access::Write)?;
        self.write.insert(path);
        Ok(())
    }

    fn resolved(&mut self, path: &Path, access: Access) -> io::Result<PathBuf> {
        let found = self.reached(path)?;
        if !self.is_no_more(&found.seen.path, &found.chosen_in, access) {
            return Err(io::Error::other(
                "a link that a server can change leads there: name what it leads to",
            ));
        }
        Ok(self.keep(found))
    }

    fn reached(&self, path: &Path) -> io::Result<Reached> {
        let mut links = BTreeMap::new();
        let there = resolve(path, &mut links)?;
        if !Self::may_be_granted(&there) {
            return Err(io::Error::other("this is no folder to give to a server"));
        }
        let chosen_in = self.writable_around(links.keys().map(PathBuf::as_path));
        // Whoever replaced a folder by a link since it was looked at did so in vain.
        Ok(Reached { seen: Seen::at(&there)?, links, chosen_in })
    }

    /// Of what servers may write, all in which any of these lies.
    fn writable_around<'a>(&self, paths: impl Iterator<Item = &'a Path>) -> BTreeSet<PathBuf> {
        let around = |path: &'a Path| self.own.iter().filter(move |own| path.starts_with(own));
        paths.flat_map(around).cloned().collect()
    }

    /// Whether a path brings nothing more than whoever chose it has: it lies in all in
    /// which that was chosen, or may be used anyway.
    fn is_no_more(&self, path: &Path, chosen_in: &BTreeSet<PathBuf>, access: Access) -> bool {
        chosen_in.iter().all(|own| path.starts_with(own))
            || match access {
                Access::Read => self.shows(path),
                Access::Write => self.write.iter().any(|folder| path.starts_with(folder)),
            }
    }

    fn keep(&mut self, found: Reached) -> PathBuf {
        let Seen { path, identity } = found.seen;
        self.seen.insert(path.clone(), identity);
        self.links.extend(found.links);
        path
    }

    fn keep_to_read(&mut self, found: Reached) {
        let path = self.keep(found);
        if !self.system.iter().chain(&self.read).any(|shown| path.starts_with(shown)) {
            self.read.insert(path);
        }
    }

    /// Grants a program what it is made of: the file, where its links lead, what
    /// interprets it, and the folders that these were installed into. After what is to
    /// be read and written, which it may be made of in any case.
    ///
    /// # Errors
    /// If that would be more than whoever may have chosen it has.
    pub(super) fn add_program(&mut self, path: &Path, home: Option<&Path>) -> io::Result<()> {
        let mut next = Some((path.to_owned(), BTreeSet::new()));
        for _ in 0..INTERPRETERS_MAX {
            let Some((path, chosen_in)) = next.take() else { break };
            // What is not there is another error's to say.
            let Ok(found) = self.reached(&path) else { break };
            let file = found.seen.clone();
            let reached_in = &chosen_in | &found.chosen_in;
            if !self.is_no_more(&file.path, &reached_in, Access::Read) {
                return Err(io::Error::other(format!(
                    "it cannot be given {}, which its program needs: what leads there, a link or \
                     the first line of a script, lies where a server may write, which could have \
                     put it there. Keep the program where no server may write, or name the folder \
                     that this is installed in under `read` of forge.toml",
                    file.path.display()
                )));
            }
            // A folder in its place is nothing to execute, and nothing to give.
            if !file.identity.is_file {
                break;
            }
            self.keep_to_read(found);
            for (program, chosen_in) in [(&path, &chosen_in), (&file.path, &reached_in)] {
                if let Some(folder) = program::installed_with(program, home)
                    && !is_shared(&folder, &file.path)
                {
                    self.add_installed(&folder, chosen_in);
                }
            }
            next = program::interpreter(&file).map(|it| match it.is_common {
                true => (it.path, BTreeSet::new()),
                false => {
                    let named_in = self.writable_around(std::iter::once(file.path.as_path()));
                    (it.path, &reached_in | &named_in)
                }
            });
        }
        Ok(())
    }

    /// What a program was installed into. What is not there it does not need.
    fn add_installed(&mut self, folder: &Path, chosen_in: &BTreeSet<PathBuf>) {
        let Ok(found) = self.reached(folder) else { return };
        let chosen_in = chosen_in | &found.chosen_in;
        if found.seen.identity.is_folder
            && self.is_no_more(&found.seen.path, &chosen_in, Access::Read)
        {
            self.keep_to_read(found);
        }
    }

    /// Grants what a word of a command line names, if it names anything: a
    /// folder or a file of data to read and write, a program's text with its
    /// project to read. What it is is asked of what the word leads to: a link may
    /// be called anything.
    pub(super) fn add_named(&mut self, word: &str, cwd: &Path, home: Option<&Path>) {
        let Some((path, is_file)) = named(word, cwd) else { return };
        let Ok(file) = self.resolved(&path, Access::Write) else { return };
        if !(is_file && (is_code(&file) || has_code_name(&path))) {
            self.write.insert(file);
            return;
        }
        let _ = self.add_read(&project(&file, home));
        // A package that is linked in has its libraries beside the link.
        if let Some(modules) = modules(&path)
            && let Ok(modules) = self.resolved(&modules, Access::Write)
            && !contains_home(&modules, home)
        {
            let _ = self.add_read(&modules);
        }
    }

    /// Whether a value that is an absolute path leads to what is not shown, or would
    /// if it were there. Its `home` and its `/tmp` are its own.
    pub(super) fn lacks(&self, value: &str, home: Option<&Path>) -> bool {
        let path = Path::new(value);
        if !path.is_absolute() {
            return false;
        }
        let there = path.canonicalize().or_else(|error| match path.parent() {
            Some(folder) => folder.canonicalize(),
            None => Err(error),
        });
        let Ok(there) = there else { return false };
        let home = home.and_then(|home| home.canonicalize().ok());
        Self::may_be_granted(&there)
            && home.is_none_or(|home| home != there)
            && there != Path::new("/tmp")
            && !KERNEL.iter().any(|kernel| there.starts_with(kernel))
            && !self.shows(&there)
    }

    /// Whether a word of a command line is a path to what is not there yet, in a folder that
    /// is not shown: a database that the server is to make.
    pub(super) fn lacks_new(&self, word: &str, cwd: &Path, home: Option<&Path>) -> bool {
        let Some(value) = value_of(word).filter(|value| value.contains('/')) else { return false };
        let path = cwd.join(value);
        !path.exists() && path.to_str().is_some_and(|path| self.lacks(path, home))
    }

    /// What a path was when it was granted, or of the system's what it is.
    pub(super) fn seen(&self, path: &Path) -> io::Result<Seen> {
        match self.seen.get(path) {
            Some(&identity) => Ok(Seen { path: path.to_owned(), identity }),
            None => Seen::at(path),
        }
    }

    fn shows(&self, path: &Path) -> bool {
        let mut shown = self.system.iter().chain(&self.read).chain(&self.write);
        shown.any(|shown| path.starts_with(shown))
    }

    /// What a word of a command line names that is there and not shown. Not what a
    /// server put there: nobody is told to give it that.
    pub(super) fn missing(&self, word: &str, cwd: &Path) -> Option<PathBuf> {
        let found = self.reached(&named(word, cwd)?.0).ok()?;
        let path = found.seen.path;
        (!self.shows(&path) && self.is_no_more(&path, &found.chosen_in, Access::Read))
            .then_some(path)
    }
}

/// What of the system's settings is not everybody's to read: keys, and who may log in.
/// For servers that are root, to whom a mode says nothing.
pub(super) fn private_settings() -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![PathBuf::from("/etc")]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            let others = if metadata.is_dir() { 0o5 } else { 0o4 };
            if metadata.is_symlink() {
                // What it leads to is found where that lies.
            } else if metadata.mode() & others != others {
                found.push(entry.path());
            } else if metadata.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    found
}

/// The path that a word of a command line names, if there is one, and whether it
/// is a file's.
fn named(word: &str, cwd: &Path) -> Option<(PathBuf, bool)> {
    let value = value_of(word)?;
    let path = cwd.join(value);
    let is_file = path.metadata().ok()?.is_file();
    // A bare word is a name of something more often than a folder here.
    (value.contains('/') || (is_file && value.contains('.'))).then_some((path, is_file))
}

/// A word that is no option, or the value of one.
fn value_of(word: &str) -> Option<&str> {
    let value = word.split_once('=').filter(|_| word.starts_with('-')).map_or(word, |it| it.1);
    (!value.is_empty() && !value.starts_with('-')).then_some(value)
}

fn has_code_name(path: &Path) -> bool {
    path.extension().and_then(|it| it.to_str()).is_some_and(|it| CODE.contains(&it))
}

/// Whether a file is a program or a program's text. By its mode only where it is
/// called nothing else: some file systems know no modes, and all is executable there.
fn is_code(file: &Path) -> bool {
    let may_be_executed = || file.metadata().is_ok_and(|it| it.permissions().mode() & 0o111 != 0);
    has_code_name(file)
        || program::begins_as_program(file)
        || (file.extension().is_none() && may_be_executed())
}

/// The folder with the libraries of a package that Node was given, and with it the
/// package: the outermost one, where those are that packages share.
fn modules(file: &Path) -> Option<PathBuf> {
    let goes_back = file.components().any(|part| part == Component::ParentDir);
    let named = |folder: &&Path| folder.file_name() == Some(OsStr::new("node_modules"));
    file.ancestors().skip(1).filter(named).last().filter(|_| !goes_back).map(Path::to_owned)
}

fn contains_home(folder: &Path, home: Option<&Path>) -> bool {
    // It may be a link, and where that leads it is the home as well.
    home.is_some_and(|home| {
        home.starts_with(folder) || home.canonicalize().is_ok_and(|home| home.starts_with(folder))
    })
}

/// Whether a folder holds more than what belongs to one of its files: somebody's home, or
/// what others may put something into. What lies in there is theirs as well, and so may be
/// what looks like the mark of a project.
fn is_shared(folder: &Path, file: &Path) -> bool {
    let is_home = folder == Path::new("/root") || folder.parent() == Some(Path::new("/home"));
    let (Ok(folder_is), Ok(file_is)) = (folder.metadata(), file.metadata()) else { return true };
    // Whoever owns the file decides what it is anyway.
    let owners = [0, rustix::process::geteuid().as_raw(), file_is.uid()];
    is_home
        || SHARED.iter().any(|shared| folder == Path::new(shared))
        || folder_is.mode() & 0o002 != 0
        || !owners.contains(&folder_is.uid())
}

/// The folder of a project that this file is in, or the file.
fn project(file: &Path, home: Option<&Path>) -> PathBuf {
    if let Some(modules) = modules(file).filter(|modules| !contains_home(modules, home)) {
        return modules;
    }
    let mut folders = file
        .ancestors()
        .skip(1)
        .take(PROJECT_LEVELS_MAX)
        .take_while(|folder| !contains_home(folder, home) && View::may_be_granted(folder))
        .take_while(|folder| !is_shared(folder, file));
    let nearest = folders.clone().next();
    folders
        .find(|folder| PROJECT.iter().any(|mark| folder.join(mark).exists()))
        .or(nearest)
        .unwrap_or(file)
        .to_owned()
}

/// Where a path leads, with each link on the way.
///
/// # Errors
/// If it leads nowhere.
pub(super) fn resolve(path: &Path, links: &mut BTreeMap<PathBuf, PathBuf>) -> io::Result<PathBuf> {
    let mut followed = 0;
    let mut found = PathBuf::from("/");
    let mut rest: Vec<PathBuf> = parts_of(path);
    while let Some(part) = rest.pop() {
        if part == Path::new("..") {
            found.pop();
            continue;
        }
        let next = found.join(&part);
        if !next.symlink_metadata()?.is_symlink() {
            found = next;
            continue;
        }
        followed += 1;
        if followed > LINKS_MAX {
            return Err(io::Error::other("too many links"));
        }
        let target = next.read_link()?;
        if target.is_absolute() {
            found = "/".into();
        }
        rest.extend(parts_of(&target));
        links.insert(next, target);
    }
    Ok(found)
}

/// The parts of a path, the last one first.
fn parts_of(path: &Path) -> Vec<PathBuf> {
    let is_step =
        |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    path.components().rev().filter(is_step).map(|part| PathBuf::from(part.as_os_str())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_on_the_way_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        std::fs::create_dir(at.join("real")).unwrap();
        std::fs::write(at.join("real/file"), "").unwrap();
        std::os::unix::fs::symlink("real", at.join("first")).unwrap();
        std::os::unix::fs::symlink(at.join("first/file"), at.join("second")).unwrap();
        let mut links = BTreeMap::new();
        assert_eq!(resolve(&at.join("second"), &mut links).unwrap(), at.join("real/file"));
        assert_eq!(links[&at.join("first")], Path::new("real"));
        assert_eq!(links[&at.join("second")], at.join("first/file"));
        std::os::unix::fs::symlink("loop", at.join("loop")).unwrap();
        assert!(resolve(&at.join("loop"), &mut links).is_err());
        assert_eq!(
            resolve(&at.join("real/../real/file"), &mut links).unwrap(),
            at.join("real/file")
        );
    }

    #[test]
    fn a_link_that_a_server_can_change_brings_it_nothing_more() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        for made in ["app/data", "secret", "given", "app/node_modules"] {
            std::fs::create_dir_all(at.join(made)).unwrap();
        }
        for made in ["secret/key", "secret/key.js", "app/data/db", "app/index.js"] {
            std::fs::write(at.join(made), "").unwrap();
        }
        let link = std::os::unix::fs::symlink;
        link(at.join("secret"), at.join("app/folder")).unwrap();
        link(at.join("secret/key"), at.join("app/conf.js")).unwrap();
        link(at.join("secret/key.js"), at.join("app/text.js")).unwrap();
        link(PathBuf::from("data/db"), at.join("app/db.sqlite")).unwrap();
        link(at.join("given"), at.join("by-the-operator")).unwrap();
        link(at.join("secret"), at.join("given/further")).unwrap();
        let words = [
            "../given/further/",
            "./folder",
            "--config=./conf.js",
            "./text.js",
            "./db.sqlite",
            "../by-the-operator",
        ]
        .map(str::to_owned);
        let cwd = at.join("app");
        let mut view = View::default();
        view.distrust([cwd.as_path()]);
        view.distrust_named(&words, &cwd);
        view.add_write(&cwd).unwrap();
        for word in &words {
            view.add_named(word, &cwd, None);
        }
        assert_eq!(view.write, [cwd.clone(), at.join("app/data/db"), at.join("given")].into());
        assert_eq!(view.read, BTreeSet::new());
        // Nor is the operator told to give it that.
        assert!(words.iter().all(|word| view.missing(word, &cwd).is_none()));
        assert!(view.add_write(&cwd.join("folder")).is_err());
        assert!(view.add_read(&cwd.join("folder/key")).is_err());
    }

    /// `path` with this text, which may be executed.
    fn made(at: &Path, path: &str, text: &str) -> PathBuf {
        let path = at.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// What a program brings to a server that may write `app`.
    fn program_in(app: &Path, program: &Path) -> Result<View, String> {
        let mut view = View::of_system();
        view.distrust([app]);
        view.add_write(app).unwrap();
        view.add_program(program, None).map(|()| view).map_err(|error| error.to_string())
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
        let mut view = View::default();
        view.add_program(&script, None).unwrap();
        assert_eq!(view.links[&python], real);
        for needed in [script, at.join("venv"), real, at.join("versions/3")] {
            assert!(view.shows(&needed), "{} of {:?}", needed.display(), view.read);
        }
    }

    #[test]
    fn a_program_that_lies_where_a_server_may_write_brings_it_nothing_that_it_names() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        let app = at.join("app");
        made(&at, "other/lib/x", "");
        let other = made(&at, "other/bin/python", "\x7fELF");
        let key = made(&at, "key", "a secret");
        let line = format!("#!{}\n", other.display());
        let far = made(&at, "other/bin/script", &line);
        let script = made(&app, "dist/run", &line);
        let wrapped = made(&app, "dist/wrapped", &format!("#!{}\n", script.display()));
        let by_env = made(&app, "dist/env", &format!("#!/usr/bin/env {}\n", other.display()));
        for refused in [&script, &wrapped, &by_env] {
            let why = program_in(&app, refused).unwrap_err();
            assert!(why.contains(&format!("{}, which", other.display())), "{why}");
        }
        for target in [&key, &other, &far, &at] {
            let link = app.join("dist/link");
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(target, &link).unwrap();
            let why = program_in(&app, &link).unwrap_err();
            assert!(why.contains(&format!("{}, which", target.display())), "{why}");
        }
        // A folder is no program, whoever named it.
        let view = program_in(&app, &at).unwrap();
        assert_eq!(view.read, BTreeSet::new());
        // What another server may have chosen is no better.
        let mut view = View::of_system();
        view.distrust([app.as_path()]);
        assert!(view.add_program(&script, None).is_err());
        assert!(view.add_read(&app.join("dist/link")).is_err());
        assert!(view.add_write(&app.join("dist/link")).is_err());
        // Not where the operator gives it anyway.
        view.add_read(&at.join("other")).unwrap();
        view.add_program(&script, None).unwrap();
    }

    #[test]
    fn a_project_that_its_server_may_write_still_has_its_programs() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        let app = at.join("app");
        let text = made(&app, "node_modules/x/index.js", "#!/usr/bin/env sh\n");
        std::fs::create_dir_all(app.join("node_modules/.bin")).unwrap();
        let linked = app.join("node_modules/.bin/x");
        std::os::unix::fs::symlink("../x/index.js", &linked).unwrap();
        let view = program_in(&app, &linked).unwrap();
        assert!(view.read.contains(&app.join("node_modules")) && view.shows(&text));
        // A virtual environment of the system's.
        made(&app, ".venv/pyvenv.cfg", "");
        std::fs::create_dir_all(app.join(".venv/bin")).unwrap();
        let python = app.join(".venv/bin/python");
        std::os::unix::fs::symlink("/bin/sh", &python).unwrap();
        let tool = made(&app, ".venv/bin/tool", &format!("#!{}\n", python.display()));
        for program in [&python, &tool] {
            assert!(program_in(&app, program).unwrap().read.contains(&app.join(".venv")));
        }
        // And one of a version that was copied in.
        std::fs::remove_file(&python).unwrap();
        made(&app, "python/lib/x", "");
        let own = made(&app, "python/bin/python3", "\x7fELF");
        std::os::unix::fs::symlink(&own, &python).unwrap();
        assert!(program_in(&app, &tool).unwrap().read.contains(&app.join("python")));
    }

    #[test]
    fn a_link_is_held_to_all_in_which_it_may_have_been_put() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        let all = at.join("all");
        for made in ["all/a/x", "all/b"] {
            std::fs::create_dir_all(at.join(made)).unwrap();
        }
        std::os::unix::fs::symlink(all.join("b"), all.join("a/b")).unwrap();
        std::os::unix::fs::symlink(all.join("a/x"), all.join("a/y")).unwrap();
        let mut view = View::default();
        view.distrust([all.as_path()]);
        view.add_read(&all.join("a/b")).unwrap();
        // What one server writes says nothing of where another may.
        std::os::unix::fs::symlink("/", at.join("whole")).unwrap();
        view.distrust([all.join("a").as_path(), &at.join("whole")]);
        view.add_write(&all.join("a/y")).unwrap();
        view.read.clear();
        assert!(view.add_read(&all.join("a/b")).is_err());
    }

    #[test]
    fn the_whole_host_is_never_granted() {
        let mut view = View::of_system();
        for path in ["/", "/proc", "/sys", "/dev", "/run"] {
            assert!(view.add_write(Path::new(path)).is_err(), "{path}");
            view.add_named(path, Path::new("/"), None);
        }
        assert_eq!(view.write, BTreeSet::new());
    }

    #[test]
    fn words_of_a_command_line_grant_what_they_name_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        for made in ["data", "app/dist", "alone"] {
            std::fs::create_dir_all(at.join(made)).unwrap();
        }
        for made in ["db.sqlite", "app/dist/index.js", "app/package.json", "alone/tool.py"] {
            std::fs::write(at.join(made), "").unwrap();
        }
        let mut view = View::default();
        let words = [
            "data".to_owned(),
            "--quick".into(),
            "https://example.org/data".into(),
            "missing/file".into(),
            at.join("data").display().to_string(),
            format!("--db={}", at.join("db.sqlite").display()),
            "app/dist/index.js".into(),
            "alone/tool.py".into(),
        ];
        assert_eq!(view.missing("alone/tool.py", &at), Some(at.join("alone/tool.py")));
        for word in words {
            view.add_named(&word, &at, None);
            assert_eq!(view.missing(&word, &at), None, "{word}");
        }
        assert_eq!(view.write, [at.join("data"), at.join("db.sqlite")].into());
        assert_eq!(view.read, [at.join("app"), at.join("alone")].into());
    }

    #[test]
    fn nobody_may_write_to_its_own_text_whatever_that_is_called() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        for (name, text, mode) in [
            ("self.js", "", 0o644),
            ("script", "#!/usr/bin/env node\n", 0o644),
            ("program", "\x7fELF", 0o644),
            ("silent", "print(1)", 0o755),
            ("notes.db", "", 0o777),
        ] {
            std::fs::write(at.join(name), text).unwrap();
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(at.join(name), mode).unwrap();
        }
        for (link, target) in [("self", "self.js"), ("notes.js", "notes.db"), ("notes", "notes.db")]
        {
            std::os::unix::fs::symlink(target, at.join(link)).unwrap();
        }
        for name in ["self.js", "self", "script", "program", "silent", "notes.js"] {
            let mut view = View::default();
            view.add_named(&format!("./{name}"), &at, None);
            assert_eq!((view.write.len(), &view.read), (0, &[at.clone()].into()), "{name}");
        }
        for name in ["notes.db", "notes"] {
            let mut view = View::default();
            view.add_named(&format!("./{name}"), &at, None);
            assert_eq!((view.read.len(), view.write), (0, [at.join("notes.db")].into()), "{name}");
        }
    }

    #[test]
    fn a_package_has_its_libraries_however_it_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        let modules = at.join("app/node_modules");
        let main = modules.join("@a/server/dist/index.js");
        let nested = modules.join("@a/server/node_modules/b/cli.js");
        for made in [&main, &nested, &at.join("work/c/cli.js"), &modules.join(".bin/x")] {
            std::fs::create_dir_all(made.parent().unwrap()).unwrap();
            std::fs::write(made, "").unwrap();
        }
        std::fs::remove_file(modules.join(".bin/x")).unwrap();
        for made in [modules.join("@a/server"), at.join("work/c"), at.join("app")] {
            std::fs::write(made.join("package.json"), "").unwrap();
        }
        std::os::unix::fs::symlink("../@a/server/dist/index.js", modules.join(".bin/x")).unwrap();
        std::os::unix::fs::symlink("../../work/c", modules.join("c")).unwrap();
        let given = |word: &Path| {
            let mut view = View::default();
            view.add_named(word.to_str().unwrap(), &at, None);
            assert_eq!(view.write, BTreeSet::new());
            view.read
        };
        for word in [&main, &nested, &modules.join(".bin/x")] {
            assert_eq!(given(word), [modules.clone()].into(), "{}", word.display());
        }
        assert_eq!(given(&modules.join("c/cli.js")), [modules.clone(), at.join("work/c")].into());
        assert_eq!(given(&modules.join("../../work/c/cli.js")), [at.join("work/c")].into());
    }

    #[test]
    fn a_path_that_a_variable_names_is_lacking_unless_it_is_shown_or_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        for made in ["given", "kept", "home"] {
            std::fs::create_dir(at.join(made)).unwrap();
        }
        std::fs::write(at.join("kept/notes"), "").unwrap();
        let mut view = View::of_system();
        view.add_write(&at.join("given")).unwrap();
        let home = at.join("home");
        let lacks = |value: &str| view.lacks(value, Some(&home));
        for value in ["kept", "kept/notes", "kept/new"] {
            assert!(lacks(at.join(value).to_str().unwrap()), "{value}");
        }
        for value in ["given", "given/new", "home", "home/new", "nowhere/new"] {
            assert!(!lacks(at.join(value).to_str().unwrap()), "{value}");
        }
        for value in ["/usr/bin/env", "/tmp", "/dev/null", "/", "kept", "", "/9j/4AAQSkZJRg"] {
            assert!(!lacks(value), "{value}");
        }
    }

    #[test]
    fn an_argument_that_is_to_be_made_where_nothing_is_given_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        for made in ["data", "given", "here"] {
            std::fs::create_dir(at.join(made)).unwrap();
        }
        std::fs::write(at.join("data/old.db"), "").unwrap();
        let mut view = View::default();
        view.add_write(&at.join("given")).unwrap();
        let lacks = |word: &str| view.lacks_new(word, &at.join("here"), None);
        let new = at.join("data/new.db").display().to_string();
        for word in [new.as_str(), &format!("--db={new}"), "../data/new.db"] {
            assert!(lacks(word), "{word}");
        }
        let (old, given) = (at.join("data/old.db"), at.join("given/new.db"));
        for word in [
            old.to_str().unwrap(),
            given.to_str().unwrap(),
            "--db-path",
            "serve",
            "@scope/package",
            "https://a.example/b",
            "",
        ] {
            assert!(!lacks(word), "{word}");
        }
    }

    #[test]
    fn a_mark_in_a_folder_that_others_may_write_widens_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let shared = folder.path().canonicalize().unwrap();
        let mode = |mode| std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(mode));
        for made in ["app/deep", "bin", "lib"] {
            std::fs::create_dir_all(shared.join(made)).unwrap();
        }
        let files = ["app/deep/srv.py", "srv.py", "bin/srv", "package.json", "others"];
        for file in files {
            std::fs::write(shared.join(file), "#!/bin/sh\n").unwrap();
        }
        let given = |word: &str| {
            let mut view = View::default();
            view.add_named(word, &shared, None);
            view.read
        };
        let program = || {
            let mut view = View::default();
            view.add_program(&shared.join("bin/srv"), None).unwrap();
            view.read
        };
        mode(0o755).unwrap();
        assert_eq!(given("app/deep/srv.py"), [shared.clone()].into());
        assert!(program().contains(&shared));
        for open in [0o1777, 0o777] {
            mode(open).unwrap();
            assert_eq!(given("app/deep/srv.py"), [shared.join("app/deep")].into());
            assert_eq!(given("./srv.py"), [shared.join("srv.py")].into());
            assert!(!program().contains(&shared));
        }
        let nobodys = |path: &str| is_shared(Path::new(path), Path::new("/etc/passwd"));
        assert!(["/tmp", "/srv", "/root", "/home/alice", "/nowhere"].into_iter().all(nobodys));
        assert!(!nobodys("/usr/lib"));
    }

    #[test]
    fn a_project_never_reaches_the_home() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().canonicalize().unwrap();
        std::fs::write(home.join("package.json"), "").unwrap();
        std::fs::write(home.join("tool.js"), "").unwrap();
        assert_eq!(project(&home.join("tool.js"), Some(&home)), home.join("tool.js"));
        std::fs::create_dir(home.join("x")).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let link = elsewhere.path().join("link");
        std::os::unix::fs::symlink(&home, &link).unwrap();
        let linked = link.join("tool.js").display().to_string();
        for home_as_said in [&home, &link] {
            for word in ["./tool.js", "x/../tool.js", &linked] {
                let mut view = View::default();
                view.add_named(word, &home, Some(home_as_said));
                assert_eq!(view.read, [home.join("tool.js")].into(), "{word}");
            }
        }
    }
}
