//! A line of `adit check`: verdict, text and remedy; the check gives it its name.

use crate::status::model::{Capability, Verdict};

fn line(verdict: Verdict, text: impl Into<String>, remedy: Option<String>) -> Capability {
    Capability {
        name: String::new(),
        verdict,
        text: text.into(),
        remedy,
    }
}

pub(crate) fn ok(text: impl Into<String>) -> Capability {
    line(Verdict::Ok, text, None)
}

pub(crate) fn degraded(text: impl Into<String>, remedy: impl Into<String>) -> Capability {
    line(Verdict::Degraded, text, Some(remedy.into()))
}

pub(crate) fn missing(text: impl Into<String>, remedy: impl Into<String>) -> Capability {
    line(Verdict::Missing, text, Some(remedy.into()))
}

/// The line of an error, whose text may end in a remedy.
pub(super) fn refused(error: &impl ToString, remedy: &str) -> Capability {
    let text = error.to_string();
    let (what, remedy) = text.rsplit_once("; ").unwrap_or((&text, remedy));
    missing(what, remedy)
}

impl Capability {
    pub(crate) fn named(self, name: &str) -> Self {
        let name = name.to_owned();
        Self { name, ..self }
    }

    /// The line of a feature, judged only if it is needed.
    pub(super) fn judged(self, needed: bool) -> Self {
        if needed { self } else { self.info() }
    }

    /// The same line without a verdict and remedy: no action is needed.
    pub(super) fn info(self) -> Self {
        Self {
            verdict: Verdict::Info,
            remedy: None,
            ..self
        }
    }
}
