//! A line of `adit check`: subject, verdict and remedy.

use crate::status::model::{Capability, Verdict};

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

pub(crate) fn ok(name: &str, text: impl Into<String>) -> Capability {
    line(name, Verdict::Ok, text, None)
}

/// The line of a feature, judged only if it is needed.
pub(super) fn judged(needed: bool, line: Capability) -> Capability {
    if needed { line } else { info(line) }
}

/// The same line without a verdict and remedy: no action is needed.
pub(super) fn info(line: Capability) -> Capability {
    Capability {
        verdict: Verdict::Info,
        remedy: None,
        ..line
    }
}

pub(crate) fn degraded(
    name: &str,
    text: impl Into<String>,
    remedy: impl Into<String>,
) -> Capability {
    line(name, Verdict::Degraded, text, Some(remedy.into()))
}

pub(crate) fn missing(
    name: &str,
    text: impl Into<String>,
    remedy: impl Into<String>,
) -> Capability {
    line(name, Verdict::Missing, text, Some(remedy.into()))
}
