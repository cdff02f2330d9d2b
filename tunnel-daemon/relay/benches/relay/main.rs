//! The forwarding loop for each driver, mover and transport: bulk in one direction, and echoes of 64 bytes. With
//! `-- table` it prints one table of rates, percentiles and system calls instead: the numbers of ADR 0010. `-- table tls` compares two ways to relay
//! pairs of which one leg is TLS: those of ADR 0036. `echo` behind either leaves bulk out. `-- files` prints what registered files would change.

mod rig;
mod ring_copy;
mod ring_files;
mod table;
mod tls_legs;

use std::time::Duration;

use criterion::{Criterion, Throughput};

use rig::{Rig, Row};

/// One measured piece of bulk: large enough that the change to splice is a small part of it.
const BULK: usize = 64 << 20;

fn bulk(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("bulk");
    group
        .throughput(Throughput::Bytes(BULK as u64))
        .sample_size(10);
    for row in Row::all() {
        let rig = Rig::start(row);
        let tunnel = rig.open();
        group.bench_function(row.name(), |bencher| {
            bencher.iter(|| rig::push(std::slice::from_ref(&tunnel), BULK));
        });
    }
    group.finish();
}

fn echo(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("echo-64B");
    for row in Row::all() {
        let rig = Rig::start(row);
        let tunnel = rig.open();
        let _answering = rig::answer(&tunnel);
        group.bench_function(row.name(), |bencher| {
            bencher.iter(|| rig::ask(&tunnel));
        });
    }
    group.finish();
}

fn main() {
    let asked = |word| std::env::args().any(|argument| argument == word);
    if asked("table") {
        let rows = if asked("tls") {
            Row::tls()
        } else {
            Row::with_attempts()
        };
        return table::print(&rows, asked("echo"));
    }
    if asked("files") {
        return ring_files::print();
    }
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    bulk(&mut criterion);
    echo(&mut criterion);
    criterion.final_summary();
}
