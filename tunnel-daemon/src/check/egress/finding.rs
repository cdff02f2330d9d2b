//! A flaw of the file, with what kube-apiserver makes of it.

use super::super::line::{degraded, missing};
use crate::status::model::Capability;

/// What kube-apiserver does with a flaw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    /// It names the flaw and exits.
    NoStart,
    /// It passes the file, and then exits with a Go panic, which names no input.
    Panic,
    /// It starts, and each connection of the selection fails.
    DialsFail,
    /// It starts and connects, in another way than the file suggests.
    Works,
}

/// One flaw.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Finding {
    pub(super) effect: Effect,
    /// What is wrong, with the input.
    pub(super) what: String,
    pub(super) remedy: String,
}

impl Finding {
    pub(super) fn new(effect: Effect, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            effect,
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    pub(super) fn line(self) -> Capability {
        let Self {
            effect,
            what,
            remedy,
        } = self;
        match effect {
            Effect::NoStart => missing(format!("{what}: kube-apiserver does not start"), remedy),
            Effect::Panic => missing(
                format!("{what}: kube-apiserver takes the file and then panics at its start"),
                remedy,
            ),
            Effect::DialsFail => missing(
                format!("{what}: kube-apiserver starts, and each of its connections there fails"),
                remedy,
            ),
            Effect::Works => degraded(what, remedy),
        }
    }
}
