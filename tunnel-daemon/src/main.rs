//! The `adit` binary: parse, run, exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    // A value that is not UTF-8 must not count as unset.
    let env = |name: &str| std::env::var_os(name).map(|text| text.to_string_lossy().into_owned());
    let names = std::env::vars_os().filter_map(|(name, _value)| name.into_string().ok());
    let names: Vec<String> = names.collect();
    match adit_config::parse_naming(std::env::args_os(), &env, &names) {
        Ok(parsed) => adit::run::run(parsed),
        Err(error) => adit::run::refuse(&error, std::env::args_os()),
    }
}
