//! Trial loads of our own programs: a kernel that has their kinds may still refuse one of them.

use aya::programs::Program;

use crate::attach::said;
use crate::caps::{Capability, HostCaps, deepest};
use crate::object::{ACCOUNT_PROGRAM, KernelError, OBJECT, load};

impl HostCaps {
    /// The same with our own programs tried out, where the rights for them exist. Takes some tens of milliseconds; nothing
    /// is attached, and nothing is left behind.
    #[must_use]
    pub fn with_programs(mut self) -> Self {
        if self.capabilities.is_ready() && self.bpf.is_ready() {
            self.bpf = verdict(try_programs(OBJECT, |name| name != ACCOUNT_PROGRAM));
        }
        if self.for_account.is_ready() && self.account_program.is_ready() {
            self.account_program = verdict(try_programs(OBJECT, |name| name == ACCOUNT_PROGRAM));
        }
        self
    }
}

/// Why a trial load failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LoadProbeError {
    /// The kernel refused the tables or a program; the text says which, and the kernel's reason.
    #[error("the kernel refused {0}: it lacks what that needs, or a seccomp profile forbids it")]
    Refused(String),
    /// The object has a program of a type that this module does not load.
    #[error("the eBPF object has the program {0} of an unsupported type")]
    UnsupportedType(String),
}

fn verdict(tried: Result<usize, LoadProbeError>) -> Capability {
    match tried {
        Ok(_number) => Capability::Ready("the kernel takes Adit's own programs".to_owned()),
        Err(error) => Capability::Missing(error.to_string()),
    }
}

/// Loads the programs of an object whose names `is_wanted` selects, and drops them. Returns how many.
///
/// # Errors
/// The kernel refused the tables or a program, or the object has a program of another type.
pub fn try_programs(
    object: &[u8],
    is_wanted: impl Fn(&str) -> bool,
) -> Result<usize, LoadProbeError> {
    let mut ebpf = load(object).map_err(|error| {
        LoadProbeError::Refused(match &error {
            KernelError::Load(cause) => format!("the tables of the programs ({})", deepest(cause)),
            other => other.to_string(),
        })
    })?;
    let mut loaded = 0;
    for (name, program) in ebpf.programs_mut().filter(|(name, _)| is_wanted(name)) {
        let outcome = match program {
            Program::CgroupSockAddr(program) => program.load(),
            Program::SockOps(program) => program.load(),
            _ => return Err(LoadProbeError::UnsupportedType(name.to_owned())),
        };
        outcome.map_err(|error| {
            LoadProbeError::Refused(format!("the program {name} ({})", said(&error)))
        })?;
        loaded += 1;
    }
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no() -> Capability {
        Capability::Missing("not today".to_owned())
    }

    #[test]
    fn refused_programs_are_named() {
        let refused = verdict(Err(LoadProbeError::Refused(
            "the program adit_connect4 (invalid)".to_owned(),
        )));
        assert!(!refused.is_ready());
        let words = refused.reason();
        assert!(
            words.contains("refused the program adit_connect4 (invalid)"),
            "{words}"
        );
        // Without privileges or with a malformed object, the check of the tables fails.
        let nonsense = try_programs(b"no object", |_name| true).unwrap_err();
        assert!(
            matches!(&nonsense, LoadProbeError::Refused(what) if what.starts_with("the tables")),
            "{nonsense}"
        );
    }

    #[test]
    fn no_program_is_loaded_without_capabilities() {
        let host = HostCaps {
            capabilities: no(),
            for_account: no(),
            ..HostCaps::probe()
        };
        let tried = host.clone().with_programs();
        assert_eq!(
            (tried.bpf, tried.account_program),
            (host.bpf, host.account_program)
        );
    }
}
