//! What it costs to find out which bytes move: the assignment of two instances, the template of two ranks, the binding of a
//! request. GLM-5.2 with an fp8 cache and blocks of 64 tokens.
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_layout::{Cut, Dtype, ModelFacts, PageTable, Slot, TableOptions, build};
use kvferry_match::{Assignment, BlockMap, Plan, Template, assign};

const BLOCK_TOKENS: u32 = 64;

fn instance(cut: &str) -> Vec<PageTable> {
    let facts = ModelFacts::from_config(include_str!("../../examples/models/glm-5.2.json")).unwrap();
    let cut: Cut = cut.parse().unwrap();
    let options = TableOptions::new(BLOCK_TOKENS, Dtype::Fp8E4m3, 1 << 16);
    (0..cut.rank_count()).map(|rank| build(&facts, &cut, rank, &options).unwrap()).collect()
}

fn matched(sources: &[PageTable], destinations: &[PageTable]) -> Vec<Assignment> {
    assign((0..).zip(sources), (0..).zip(destinations)).unwrap()
}

fn template(from: &str, to: &str) -> Template {
    let (sources, destinations) = (instance(from), instance(to));
    matched(&sources, &destinations)[0].template(0).unwrap()
}

/// Every destination rank of one instance against all sources of the other, coverage proved.
fn assignment(c: &mut Criterion) {
    let mut group = c.benchmark_group("assign");
    for (from, to) in [("pp4", "tp8"), ("pp64", "pp64"), ("pp8tp8", "tp64"), ("pp8tp8", "pp16tp4")] {
        let (sources, destinations) = (instance(from), instance(to));
        group.throughput(Throughput::Elements(destinations.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{from} to {to}")), |b| {
            b.iter(|| matched(&sources, &destinations));
        });
    }
    group.finish();
}

/// One pair of ranks.
fn pieces(c: &mut Criterion) {
    let mut group = c.benchmark_group("template");
    for (from, to) in [("pp4", "tp8"), ("pp3", "pp4")] {
        let (sources, destinations) = (instance(from), instance(to));
        let assignment = &matched(&sources, &destinations)[0];
        group.bench_function(BenchmarkId::from_parameter(format!("{from} to {to}")), |b| {
            b.iter(|| assignment.template(0).unwrap());
        });
    }
    group.finish();
}

/// One request, buffers reused.
fn binding(c: &mut Criterion) {
    let mut group = c.benchmark_group("bind");
    let template = template("pp4", "tp8");
    for blocks in [128u32, 2048] {
        let map = |step: u32| vec![BlockMap::dense(0, (0..blocks).map(|i| Slot(i * step % (1 << 16))))];
        let (source, destination) = (map(3), map(5));
        let tokens = 0..u64::from(blocks * BLOCK_TOKENS);
        let mut plan = Plan::default();
        group.throughput(Throughput::Elements(u64::from(blocks)));
        group.bench_function(BenchmarkId::from_parameter(blocks), |b| {
            b.iter(|| template.bind_into(&source, &destination, tokens.clone(), &mut plan).unwrap());
        });
    }
    group.finish();
}

criterion_group!(benches, assignment, pieces, binding);
criterion_main!(benches);
