//! Where a run's artifacts go.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use forge_protocol::run::Artifact;
use forge_vmm::admission::shown;

use super::failed;
use crate::cli::{CliError, complain, progress};

/// Writes artifacts as new files, if a folder is named for them. Their names are the
/// program's, so they are made into plain file names first; nothing is ever
/// overwritten. `at` hears where each went, by its number.
pub(super) fn keep(
    folder: Option<&Path>,
    json: bool,
    artifacts: &[Artifact],
    mut at: impl FnMut(usize, String),
) -> Result<(), CliError> {
    let Some(folder) = folder else {
        if !artifacts.is_empty() && !json {
            let count = artifacts.len();
            complain(&format!("artifacts not kept: {count}; --artifacts DIR keeps them"));
        }
        return Ok(());
    };
    for (number, artifact) in artifacts.iter().enumerate() {
        let (path, mut file) = new_file(folder, &artifact.file_name())?;
        file.write_all(&artifact.content).map_err(failed(&path))?;
        progress(&format!("artifact {} → {}", shown(&artifact.name), path.display()));
        at(number, path.display().to_string());
    }
    Ok(())
}

/// A file of the first name of its kind that is not taken.
fn new_file(folder: &Path, name: &str) -> Result<(PathBuf, File), CliError> {
    let mut path = folder.join(name);
    let mut number = 2u64;
    loop {
        match File::create_new(&path) {
            // Another run may have taken it just now.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                path = folder.join(format!("{number}-{name}"));
                number += 1;
            }
            Err(error) => return Err(failed(&path)(error)),
            Ok(file) => return Ok((path, file)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_of_one_name_that_are_made_at_once_are_each_a_file_of_their_own() {
        let folder = std::env::temp_dir().join(format!("forge-new-file-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let make = || (0..64).map(|_| new_file(&folder, "a").unwrap().0).collect::<Vec<_>>();
        let mut made = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        made.sort();
        made.dedup();
        assert_eq!(made.len(), 4 * 64);
        fs::remove_dir_all(&folder).unwrap();
    }
}
