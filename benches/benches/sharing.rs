//! What large instances cost before anything moves: time and memory of who sends what, and of the templates, which ranks of
//! equal layout share. Prints a table first; the memory in it is counted by the allocator.
//!
//! GLM-5.2, fp8 cache, blocks of 64 tokens. Decode ranks are cut into 4 pipeline stages, so that they have 4 layouts however
//! many they are.
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::alloc::System;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_layout::{Cut, Dtype, ModelFacts, PageTable, TableOptions, build};
use kvferry_match::{Assignment, Template, Templates, assign};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Cuts of prefill and decode instances of equal size.
const CUTS: [(&str, &str); 4] =
    [("pp4tp2", "pp4tp2"), ("pp8tp8", "pp4tp16"), ("pp8tp32", "pp4tp64"), ("pp8tp128", "pp4tp256")];

fn instance(cut: &str) -> Vec<PageTable> {
    let facts = ModelFacts::from_config(include_str!("../../examples/models/glm-5.2.json")).unwrap();
    let cut: Cut = cut.parse().unwrap();
    let options = TableOptions::new(64, Dtype::Fp8E4m3, 1 << 16);
    (0..cut.rank_count()).map(|rank| build(&facts, &cut, rank, &options).unwrap()).collect()
}

fn matched(sources: &[PageTable], destinations: &[PageTable]) -> Vec<Assignment> {
    assign((0..).zip(sources), (0..).zip(destinations)).unwrap()
}

/// One for each pair of ranks that talk to each other.
fn made(assignments: &[Assignment], templates: &mut Templates) -> Vec<Template> {
    let pairs = assignments.iter().flat_map(|assignment| assignment.sources().map(move |rank| (assignment, rank)));
    pairs.map(|(assignment, rank)| templates.template(assignment, rank).unwrap()).collect()
}

/// What `make` returns, and the bytes that it holds.
fn held<T>(make: impl FnOnce() -> T) -> (T, usize) {
    let region = Region::new(ALLOCATOR);
    let made = make();
    let change = region.change();
    (made, change.bytes_allocated - change.bytes_deallocated)
}

fn print() {
    println!("ranks  from      to        pairs    that talk  templates  assignments B  templates B  alone B");
    for (from, to) in CUTS {
        let (sources, destinations) = (instance(from), instance(to));
        let (assignments, assignment_bytes) = held(|| matched(&sources, &destinations));
        let mut templates = Templates::default();
        let (shared, shared_bytes) = held(|| made(&assignments, &mut templates));
        let (_, alone_bytes) = held(|| {
            let made = |assignment: &Assignment| -> Vec<Template> {
                assignment.sources().map(|rank| assignment.template(rank).unwrap()).collect()
            };
            assignments.iter().map(made).collect::<Vec<_>>()
        });
        println!(
            "{:<5}  {from:<8}  {to:<8}  {:<7}  {:<9}  {:<9}  {assignment_bytes:<13}  {shared_bytes:<11}  {alone_bytes}",
            sources.len(),
            sources.len() * destinations.len(),
            shared.len(),
            templates.len(),
        );
    }
}

fn sharing(c: &mut Criterion) {
    print();
    let mut group = c.benchmark_group("sharing");
    group.sample_size(10);
    for (from, to) in CUTS {
        let (sources, destinations) = (instance(from), instance(to));
        group.throughput(Throughput::Elements(destinations.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{from} to {to}")), |b| {
            b.iter(|| {
                let assignments = matched(&sources, &destinations);
                let mut templates = Templates::default();
                made(&assignments, &mut templates).len()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, sharing);
criterion_main!(benches);
