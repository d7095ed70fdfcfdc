//! What a run left, on its way to a client: in parts, so that no run's artifacts keep
//! the ends of others waiting, and put together there.

use alloc::vec::Vec;
use core::fmt;

use crate::limits::{ARTIFACT_BYTES_MAX, ARTIFACTS_MAX};
use crate::run::Artifact;
use crate::service::{Finish, Finished, Part};

/// The contents of one run's artifacts, as far as they have come.
#[derive(Debug, Default)]
pub struct Contents(Vec<Vec<u8>>);

impl Contents {
    /// Takes what came next.
    ///
    /// # Errors
    /// [`OutOfPlace`]: it continues nothing, or more than there may be.
    pub fn take(&mut self, part: Part) -> Result<(), OutOfPlace> {
        let Self(contents) = self;
        let Part { artifact, content, .. } = part;
        if artifact >= ARTIFACTS_MAX || (artifact as usize) + 1 < contents.len() {
            return Err(OutOfPlace { artifact });
        }
        let at = artifact as usize;
        // Those in between are empty.
        contents.resize_with(contents.len().max(at + 1), Vec::new);
        let whole = &mut contents[at];
        if whole.len() + content.len() > ARTIFACT_BYTES_MAX as usize {
            return Err(OutOfPlace { artifact });
        }
        match whole.is_empty() {
            true => *whole = content,
            false => whole.extend_from_slice(&content),
        }
        Ok(())
    }

    /// All that came, under the names that the run's end gives.
    ///
    /// # Errors
    /// [`OutOfPlace`]: an artifact is not as long as it is said to be.
    pub fn finish(self, finished: Finished) -> Result<Finish, OutOfPlace> {
        let Self(contents) = self;
        let Finished { report, artifacts, .. } = finished;
        if contents.len() > artifacts.len() {
            return Err(OutOfPlace { artifact: artifacts.len() as u32 });
        }
        let contents = contents.into_iter().chain(core::iter::repeat_with(Vec::new));
        let whole = (0..).zip(artifacts).zip(contents).map(|((artifact, left), content)| {
            if content.len() as u64 != u64::from(left.bytes) {
                return Err(OutOfPlace { artifact });
            }
            Ok(Artifact { name: left.name, media_type: left.media_type, content })
        });
        Ok(Finish { report, artifacts: whole.collect::<Result<_, _>>()? })
    }
}

/// A part of an artifact that does not belong there, or is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfPlace {
    /// Which artifact of the run's, from 0.
    pub artifact: u32,
}

impl fmt::Display for OutOfPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the parts of artifact {} are not what it is said to be", self.artifact)
    }
}

impl core::error::Error for OutOfPlace {}

#[cfg(test)]
mod tests {
    use alloc::string::String;
    use alloc::vec;

    use super::*;
    use crate::service::Left;

    fn part(artifact: u32, content: &[u8]) -> Part {
        Part { number: 1, artifact, content: content.to_vec() }
    }

    fn finished(bytes: &[u32]) -> Finished {
        let left = |bytes: &u32| {
            let (name, media_type) = (String::new(), String::new());
            Left { name, media_type, bytes: *bytes }
        };
        Finished { number: 1, report: vec![], artifacts: bytes.iter().map(left).collect() }
    }

    fn gathered(parts: &[Part], bytes: &[u32]) -> Result<Vec<Vec<u8>>, OutOfPlace> {
        let mut contents = Contents::default();
        parts.iter().cloned().try_for_each(|part| contents.take(part))?;
        let Finish { artifacts, .. } = contents.finish(finished(bytes))?;
        Ok(artifacts.into_iter().map(|it| it.content).collect())
    }

    #[test]
    fn parts_make_the_artifacts_again_and_an_empty_one_has_none() {
        let parts = [part(1, b"ab"), part(1, b"c"), part(3, b"d")];
        let whole = gathered(&parts, &[0, 3, 0, 1, 0]).unwrap();
        assert_eq!(whole, [&b""[..], b"abc", b"", b"d", b""]);
        assert_eq!(gathered(&[], &[]).unwrap(), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn parts_that_are_no_artifact_of_the_runs_are_told_by_its_number() {
        let wrong = |parts: &[Part], bytes: &[u32]| gathered(parts, bytes).unwrap_err().artifact;
        assert_eq!(wrong(&[part(1, b"a"), part(0, b"b")], &[1, 1]), 0, "out of order");
        assert_eq!(wrong(&[part(ARTIFACTS_MAX, b"a")], &[]), ARTIFACTS_MAX);
        assert_eq!(wrong(&[part(0, b"a"), part(1, b"b")], &[1]), 1, "one more than there are");
        assert_eq!(wrong(&[part(0, b"a")], &[1, 1]), 1, "one did not come");
        assert_eq!(wrong(&[part(0, b"ab")], &[1]), 0);
        let most = vec![0; ARTIFACT_BYTES_MAX as usize];
        assert_eq!(wrong(&[part(2, &most), part(2, b"a")], &[]), 2, "longer than one may be");
    }
}
