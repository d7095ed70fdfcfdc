//! The boot archive, read by [`archive::entries`].

use forge_protocol::platform::archive::{self, Builder};

use super::{Outcome, Seed, accepted, refused};

/// Entries lie inside the archive, one behind the other, and an archive made
/// of them gives the same entries again.
pub fn check(data: &[u8]) -> Outcome {
    let mut builder = Builder::default();
    let mut read = Vec::new();
    let mut end = data.as_ptr() as usize;
    for (name, content) in archive::entries(data) {
        let (name_at, content_at) = (name.as_ptr() as usize, content.as_ptr() as usize);
        assert!(end < name_at && name_at + name.len() < content_at, "entries overlap");
        end = content_at + content.len();
        assert!(end <= data.as_ptr() as usize + data.len(), "an entry past the archive");
        builder.add(name, content);
        read.push((name, content));
    }
    let again = builder.finish();
    assert!(archive::entries(&again).eq(read.iter().copied()), "the entries changed");
    Outcome::of(!read.is_empty())
}

/// An archive as the supervisor makes it, and one that is cut.
pub fn seeds() -> Vec<Seed> {
    let mut builder = Builder::default();
    builder.add("trust/0", &[1; 32]).add("runtime/js", b"abc").add("empty", b"");
    let whole = builder.finish();
    let cut = whole[..100].to_vec();
    vec![
        accepted("three-entries", whole),
        refused("empty", Builder::default().finish()),
        refused("cut", cut),
    ]
}
