//! How long a step of each path takes.
//!
//! `cargo bench -p forge-benches --bench paths`; `-- --test` takes one step of
//! each, which is what CI does.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};

fn paths(c: &mut Criterion) {
    for entry in forge_benches::entries() {
        let mut path = match (entry.make)() {
            Ok(path) => path,
            Err(error) => panic!("{}: {error}", entry.name),
        };
        c.bench_function(entry.name, |b| {
            b.iter(|| assert!(black_box(path.step()).is_ok(), "{} fails", entry.name));
        });
    }
}

criterion_group!(all, paths);
criterion_main!(all);
