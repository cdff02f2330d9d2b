//! The `adit` binary: parse, run, exit code.

use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let env = |name: &str| std::env::var(name).ok();
    match adit::config::parse(std::env::args_os(), &env) {
        Ok(parsed) => adit::app::run::run(parsed),
        Err(error) => {
            // Nobody may read it: the exit code still tells.
            let _unread = std::io::stderr().write_all(error.rendered().as_bytes());
            ExitCode::from(error.exit_code())
        }
    }
}
