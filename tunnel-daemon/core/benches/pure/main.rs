//! The parts of the byte path that have no I/O: packets, frames, a step of a session, the choice of an agent.
//!
//! Numbers are per operation and of one core; what a system call or a cache miss adds is for `cargo xtask perf`.
//! Times are criterion's. `--ops` names the operations, and `--op=NAME --times=N` only runs one, for tools that count.

mod count;
mod frames;
mod operation;
mod packets;
mod sessions;
mod strategies;

use std::process::ExitCode;
use std::time::Duration;

use criterion::Criterion;

use count::Request;
use operation::Operation;

fn main() -> ExitCode {
    let operations: Vec<Operation> = packets::operations()
        .chain(frames::operations())
        .chain(sessions::operations())
        .chain(strategies::operations())
        .collect();
    let outcome = match Request::parse(std::env::args().skip(1)) {
        Ok(None) => {
            time(&operations);
            Ok(())
        }
        Ok(Some(request)) => request.run(&operations),
        Err(error) => Err(error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn time(operations: &[Operation]) {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    for operation in operations {
        operation.time(&mut criterion);
    }
    criterion.final_summary();
}
