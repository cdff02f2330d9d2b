//! The `adit` binary: parse, run, exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    let env = |name: &str| std::env::var(name).ok();
    match adit::config::parse(std::env::args_os(), &env) {
        Ok(parsed) => adit::app::run::run(parsed),
        Err(error) => adit::app::run::refuse(&error, std::env::args_os()),
    }
}
