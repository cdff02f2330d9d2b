//! Runs one operation a number of times and nothing else, under a tool that counts: `cargo xtask perf --instructions`.

use crate::operation::Operation;

/// What the command line asks for in place of times.
pub(crate) enum Request {
    /// The names of all operations, one a line.
    Names,
    /// One operation, so many times.
    Run { name: String, times: u64 },
}

impl Request {
    /// `None` if the command line is criterion's.
    ///
    /// # Errors
    /// Half a request, or both at once.
    pub(crate) fn parse(args: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let (mut names, mut op, mut times) = (false, None, None);
        // Others are cargo's own, such as `--bench`.
        for arg in args {
            if arg == "--ops" {
                names = true;
            } else if let Some(name) = arg.strip_prefix("--op=") {
                op = Some(name.to_owned());
            } else if let Some(number) = arg.strip_prefix("--times=") {
                let number = number.parse();
                times = Some(number.map_err(|error| format!("`{arg}`: {error}"))?);
            }
        }
        match (names, op, times) {
            (false, None, None) => Ok(None),
            (true, None, None) => Ok(Some(Self::Names)),
            (false, Some(name), Some(times)) => Ok(Some(Self::Run { name, times })),
            _ => Err("either `--ops`, or `--op=NAME` and `--times=N` together".to_owned()),
        }
    }

    /// Does it.
    ///
    /// # Errors
    /// No operation has the name.
    pub(crate) fn run(self, operations: &[Operation]) -> Result<(), String> {
        match self {
            Self::Names => {
                for operation in operations {
                    println!("{}", operation.name());
                }
            }
            Self::Run { name, times } => {
                let found = operations.iter().find(|one| one.name() == name);
                let found =
                    found.ok_or_else(|| format!("no operation is named `{name}`, see `--ops`"))?;
                repeat(&mut found.prepare(), times);
            }
        }
        Ok(())
    }
}

/// What is counted: `cargo xtask perf --instructions` knows this function by its name, and looks at nothing outside it.
#[inline(never)]
fn repeat(work: &mut dyn FnMut(), times: u64) {
    for _ in 0..times {
        work();
    }
}
