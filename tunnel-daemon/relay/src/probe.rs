//! Chooses a driver that this host allows. The probe creates a real ring, since a version number does not show what a
//! seccomp profile or a sysctl forbids.

use std::io;
use std::str::FromStr;

use rustix::io::Errno;

use crate::syscall::ring::Ring;

/// The operator's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// The driver that measurements favour.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// epoll.
    Epoll,
}

impl FromStr for Preference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "io-uring" => Ok(Self::IoUring),
            "epoll" => Ok(Self::Epoll),
            _ => Err(format!(
                "{text:?} is not known: write auto, io-uring or epoll"
            )),
        }
    }
}

/// A driver of the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Readiness by io_uring.
    IoUring,
    /// Readiness by epoll.
    Epoll,
}

impl Engine {
    /// The name in flags, logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io-uring",
            Self::Epoll => "epoll",
        }
    }
}

/// The reason for a choice, as a metrics label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Basis {
    /// The operator asked for this driver.
    Asked,
    /// Both drivers are possible, and measurements favour this one.
    Measured,
    /// A seccomp profile or a sysctl forbids the other driver.
    Forbidden,
    /// The kernel lacks the other driver, or a profile hides it.
    Kernel,
    /// Memory or descriptors do not suffice for the other driver.
    Resources,
    /// The other driver failed with an unknown error.
    Unknown,
}

/// The driver to use, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The driver.
    pub engine: Engine,
    /// The reason, for labels.
    pub basis: Basis,
    /// The reason as text, for logs.
    pub reason: String,
}

/// io_uring was requested but is not possible on this host.
#[derive(Debug, thiserror::Error)]
#[error("io_uring is not possible here: {reason}; {remedy}, or choose `epoll` or `auto`")]
pub struct ProbeError {
    /// The reason, for labels.
    pub basis: Basis,
    /// The reason as text.
    pub reason: String,
    /// What the operator can do.
    pub remedy: &'static str,
}

/// Chooses the driver for `preference`.
///
/// # Errors
/// io_uring was requested and this host does not allow it.
pub fn probe(preference: Preference) -> Result<Choice, ProbeError> {
    let ring = match preference {
        Preference::Epoll => None,
        Preference::Auto | Preference::IoUring => Some(Ring::probe().map_err(explain)),
    };
    choose(preference, ring)
}

fn choose(
    preference: Preference,
    ring: Option<Result<(), ProbeError>>,
) -> Result<Choice, ProbeError> {
    let choice = |engine, basis, reason: String| {
        Ok(Choice {
            engine,
            basis,
            reason,
        })
    };
    let asked = |engine| choice(engine, Basis::Asked, "asked for by name".to_owned());
    match (preference, ring) {
        (Preference::Epoll, _) | (_, None) => asked(Engine::Epoll),
        (Preference::IoUring, Some(Ok(()))) => asked(Engine::IoUring),
        (Preference::IoUring, Some(Err(error))) => Err(error),
        (Preference::Auto, Some(Ok(()))) => choice(
            AUTO,
            Basis::Measured,
            "as fast as io_uring in our measurements, with less of the kernel in reach".to_owned(),
        ),
        (Preference::Auto, Some(Err(error))) => choice(
            Engine::Epoll,
            error.basis,
            format!("io_uring is not possible here: {}", error.reason),
        ),
    }
}

/// The driver if both are possible; see ADR 0010.
const AUTO: Engine = Engine::Epoll;

fn explain(error: io::Error) -> ProbeError {
    let known = match Errno::from_io_error(&error) {
        Some(Errno::PERM | Errno::ACCESS) => Some((
            Basis::Forbidden,
            "io_uring_setup is forbidden by a seccomp profile or by the sysctl kernel.io_uring_disabled",
            "allow it in the profile and set the sysctl to 0",
        )),
        Some(Errno::NOSYS) => Some((
            Basis::Kernel,
            "the kernel has no io_uring, or a seccomp profile hides it",
            "use a kernel from 6.1 on with io_uring built in",
        )),
        Some(Errno::INVAL | Errno::OPNOTSUPP) => Some((
            Basis::Kernel,
            "the kernel is older than 6.1",
            "use a kernel from 6.1 on",
        )),
        Some(Errno::NOMEM) => Some((
            Basis::Resources,
            "there is no memory for a ring",
            "raise the locked-memory or cgroup limit",
        )),
        Some(Errno::MFILE | Errno::NFILE) => Some((
            Basis::Resources,
            "there is no descriptor left for a ring",
            "raise the limit of open files",
        )),
        _ => None,
    };
    known.map_or_else(
        || ProbeError {
            basis: Basis::Unknown,
            reason: error.to_string(),
            remedy: "remove what the message names",
        },
        |(basis, reason, remedy)| ProbeError {
            basis,
            reason: format!("{reason} ({error})"),
            remedy,
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn impossible(errno: Errno) -> Option<Result<(), ProbeError>> {
        Some(Err(explain(errno.into())))
    }

    #[test]
    fn auto_falls_back_to_epoll_with_a_reason_in_words() {
        for (errno, basis, words) in [
            (Errno::PERM, Basis::Forbidden, "seccomp"),
            (Errno::NOSYS, Basis::Kernel, "no io_uring"),
            (Errno::INVAL, Basis::Kernel, "older than 6.1"),
            (Errno::NOMEM, Basis::Resources, "no memory"),
            (Errno::MFILE, Basis::Resources, "no descriptor"),
            (Errno::IO, Basis::Unknown, "error"),
        ] {
            let choice = choose(Preference::Auto, impossible(errno)).unwrap();
            assert_eq!((choice.engine, choice.basis), (Engine::Epoll, basis));
            assert!(choice.reason.contains(words), "{}", choice.reason);
        }
    }

    #[test]
    fn impossible_ring_asked_for_by_name_is_an_error_with_a_remedy() {
        let error = choose(Preference::IoUring, impossible(Errno::PERM)).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("kernel.io_uring_disabled") && text.contains("set the sysctl to 0"),
            "{text}"
        );
    }

    #[test]
    fn preferences_are_spelt_as_engines_are() {
        for engine in [Engine::IoUring, Engine::Epoll] {
            assert!(engine.name().parse::<Preference>().is_ok());
        }
        assert_eq!("auto".parse(), Ok(Preference::Auto));
        let error = "uring".parse::<Preference>().unwrap_err();
        assert!(error.contains("auto, io-uring or epoll"), "{error}");
    }

    #[test]
    fn epoll_by_name_needs_no_ring() {
        let choice = probe(Preference::Epoll).unwrap();
        assert_eq!((choice.engine, choice.basis), (Engine::Epoll, Basis::Asked));
    }

    #[test]
    fn engine_choice_is_based_on_a_name_or_on_measurements() {
        for (preference, engine, basis) in [
            (Preference::Auto, AUTO, Basis::Measured),
            (Preference::IoUring, Engine::IoUring, Basis::Asked),
        ] {
            let choice = choose(preference, Some(Ok(()))).unwrap();
            assert_eq!((choice.engine, choice.basis), (engine, basis));
        }
    }
}
