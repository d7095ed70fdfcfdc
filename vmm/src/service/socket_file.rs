//! The file of a listening unix socket: who may replace one that is there, and
//! who removes it.
//!
//! A socket's file stays when its process dies, and whoever starts next takes
//! the place. That nobody listens there is the kernel's word alone
//! (`ECONNREFUSED`, connect(2)). Between that word and the new socket no other
//! may come, so whoever binds holds a lock, on a file beside it that is there
//! for as long. An operator's own files stay what they are.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{
    FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forge_client::blocking::reach;

/// How long a place is waited for at a socket where as many wait as may.
const PLACE_TIME_MAX: Duration = Duration::from_millis(100);
/// What the name of the lock ends with.
const LOCK_SUFFIX: &str = ".lock";

/// The file of a socket that listens. Removed with this, if it is still that one.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Listens at this path, with this mode. A socket that nobody listens at any
    /// more is replaced.
    ///
    /// # Errors
    /// `AddrInUse` if somebody listens there or may, `AlreadyExists` if something else
    /// lies there; else what the kernel said.
    pub fn bind(path: &Path, mode: u32) -> io::Result<(UnixListener, Self)> {
        let _lock = Lock::beside(path)?;
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_dead(path)?;
                UnixListener::bind(path)?
            }
            bound => bound?,
        };
        let made = path.symlink_metadata()?;
        let file = Self { path: path.to_owned(), device: made.dev(), inode: made.ino() };
        fs::set_permissions(path, Permissions::from_mode(mode))?;
        Ok((listener, file))
    }

    /// The socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have moved it away, and listen there now.
        let is_ours = |there: Metadata| (there.dev(), there.ino()) == (self.device, self.inode);
        if self.path.symlink_metadata().is_ok_and(is_ours) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket that nobody listens at.
fn remove_dead(path: &Path) -> io::Result<()> {
    let in_use = |what| Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    if !path.symlink_metadata()?.file_type().is_socket() {
        // It does not go away by itself.
        let why = "in use by what is no socket: move it away, or listen elsewhere";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    // Whoever waits for the lock waits for this.
    match reach(path, PLACE_TIME_MAX) {
        Ok(_) => {
            in_use("in use: a service listens there; drain it, or listen elsewhere".to_owned())
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => in_use(
            "in use: a service listens there that takes nobody in, because it is stopped or \
             overloaded; end it, or listen elsewhere"
                .to_owned(),
        ),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        // It went by itself.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => in_use(format!(
            "in use by a socket of which nobody can say whether a service listens there \
             ({error}): move it away, or listen elsewhere"
        )),
    }
}

/// Held by who binds. Its file is gone with it.
struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    fn beside(socket: &Path) -> io::Result<Self> {
        let mut path = socket.as_os_str().to_owned();
        path.push(LOCK_SUFFIX);
        let path = PathBuf::from(path);
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)
                .map_err(|error| {
                    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
                })?;
            file.lock()?;
            // Whoever held it has removed it: then the next has another.
            let of = |it: Metadata| (it.dev(), it.ino());
            let locked = of(file.metadata()?);
            if path.symlink_metadata().is_ok_and(|there| of(there) == locked) {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before it is given up: nobody who waits takes it for the one that is
        // there.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    /// A folder that is gone after the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("forge-socket-{}-{name}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_dead_socket_is_replaced_by_one_of_those_who_start_at_once() {
        let folder = Folder::new("race");
        let path = folder.0.join("s");
        for _ in 0..50 {
            drop(UnixListener::bind(&path).unwrap());
            let starts = || SocketFile::bind(&path, 0o600);
            let all = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(starts)).collect();
                threads.into_iter().map(|it| it.join().unwrap()).collect::<Vec<_>>()
            });
            let refused = all.iter().filter_map(|it| it.as_ref().err());
            assert!(refused.clone().all(|it| it.kind() == io::ErrorKind::AddrInUse), "{all:?}");
            assert_eq!(refused.count(), 3, "{all:?}");
            assert_eq!(folder.names(), ["s"]);
            assert!(UnixStream::connect(&path).is_ok(), "the one that is there does not listen");
            drop(all);
            assert!(folder.names().is_empty());
        }
    }

    #[test]
    fn only_a_socket_that_refuses_is_taken_for_dead() {
        let folder = Folder::new("other");
        let path = folder.0.join("s");
        let refused = || SocketFile::bind(&path, 0o600).unwrap_err().to_string();
        // Somebody is there, and is no service that could be asked.
        let datagrams = UnixDatagram::bind(&path).unwrap();
        let said = refused();
        assert!(said.contains("nobody can say") && said.contains("move it away"), "{said}");
        drop(datagrams);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        assert!(refused().contains("no socket"));
        let kind = SocketFile::bind(&path, 0o600).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::AlreadyExists, "it does not go away by itself");
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        assert_eq!(folder.names(), ["s"], "a lock stays");
    }

    #[test]
    fn a_socket_with_as_many_before_it_as_may_be_is_in_use() {
        let folder = Folder::new("full");
        let path = folder.0.join("s");
        let listener = UnixListener::bind(&path).unwrap();
        // With room for as few as can be: descriptors may be few as well.
        // SAFETY: a descriptor of our own; no memory is touched.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 1) }, 0);
        let mut waiting = Vec::new();
        while let Ok(socket) = reach(&path, PLACE_TIME_MAX) {
            waiting.push(socket);
        }
        let said = SocketFile::bind(&path, 0o600).unwrap_err();
        assert_eq!(said.kind(), io::ErrorKind::AddrInUse);
        assert!(said.to_string().contains("stopped or overloaded"), "{said}");
    }

    #[test]
    fn a_socket_that_took_the_place_meanwhile_stays() {
        let folder = Folder::new("place");
        let path = folder.0.join("s");
        let (_first, file) = SocketFile::bind(&path, 0o600).unwrap();
        fs::rename(&path, folder.0.join("away")).unwrap();
        let (_second, other) = SocketFile::bind(&path, 0o640).unwrap();
        drop(file);
        assert_eq!(path.symlink_metadata().unwrap().mode() & 0o777, 0o640);
        drop(other);
        assert_eq!(folder.names(), ["away"]);
    }
}
