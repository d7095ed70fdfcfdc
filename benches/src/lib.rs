//! The paths that every run or every call takes on the host, without a VM,
//! one step at a time. Two benches go through the same list: `paths` says how
//! long a step takes, `instructions` how many instructions, which no
//! neighbour on the machine can change.
//!
//! What a whole run costs is `forge-vmm bench`'s to say, and how it compares
//! with others `benches/peers`.

#![forbid(unsafe_code)]

mod messages;
mod programs;
mod queue;

/// One path, set up.
pub trait Path {
    /// Takes one step of it.
    ///
    /// # Errors
    /// What went wrong, for a reader: a path that fails is not measured.
    fn step(&mut self) -> Result<(), String>;
}

/// A path by its name.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Its stable name, `room/what`.
    pub name: &'static str,
    /// Sets it up; not measured.
    pub make: fn() -> Result<Box<dyn Path>, String>,
}

/// Every path there is.
#[must_use]
pub fn entries() -> Vec<Entry> {
    [messages::ENTRIES, programs::ENTRIES, queue::ENTRIES].concat()
}

/// A path that is one function and what it needs.
struct Step<F>(F);

impl<F: FnMut() -> Result<(), String>> Path for Step<F> {
    fn step(&mut self) -> Result<(), String> {
        (self.0)()
    }
}

fn step(f: impl FnMut() -> Result<(), String> + 'static) -> Box<dyn Path> {
    Box::new(Step(f))
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}
