//! The `adit` binary: parse, run, exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    // A value that is not UTF-8 must not count as unset.
    let env = |name: &str| std::env::var_os(name).map(|text| text.to_string_lossy().into_owned());
    match adit_config::parse(std::env::args_os(), &env) {
        Ok(parsed) => adit::run::run(parsed),
        Err(error) => adit::run::refuse(&error, std::env::args_os()),
    }
}
