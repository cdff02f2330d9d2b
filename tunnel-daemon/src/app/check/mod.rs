//! `adit check`: what this host, and the flags that follow, allow; what is missing, and what to do about it.
//!
//! Probes gather facts; verdicts are drawn from facts alone, so each of them is tested without the host it is about.

mod host;
mod kernel;

use super::status::model::{Capability, Verdict};

/// What the host allows, as `adit status` shows it.
pub(super) fn host_lines() -> Vec<Capability> {
    host::lines(&host::Facts::gather())
}

fn line(
    name: &str,
    verdict: Verdict,
    text: impl Into<String>,
    remedy: Option<String>,
) -> Capability {
    Capability {
        name: name.to_owned(),
        verdict,
        text: text.into(),
        remedy,
    }
}

fn ok(name: &str, text: impl Into<String>) -> Capability {
    line(name, Verdict::Ok, text, None)
}

fn degraded(name: &str, text: impl Into<String>, remedy: impl Into<String>) -> Capability {
    line(name, Verdict::Degraded, text, Some(remedy.into()))
}

fn missing(name: &str, text: impl Into<String>, remedy: impl Into<String>) -> Capability {
    line(name, Verdict::Missing, text, Some(remedy.into()))
}
