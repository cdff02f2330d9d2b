//! Why a dial failed, with the text and the metric label of each cause.

use crate::grant::TargetDenied;

/// Outcome of a failed dial: one variant per cause that callers treat differently.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DialFailure {
    /// No strategy found an agent for the target.
    #[error("No agent available")]
    NoAgent,
    /// The agent answered that the target cannot be reached; the text is the agent's.
    #[error("{0}")]
    Target(String),
    /// The agent did not answer before the deadline.
    #[error("timed out waiting for backend dial")]
    TimedOut,
    /// The agent's link took no request before the deadline, so the agent cannot have seen it.
    #[error("timed out waiting for backend dial")]
    SendTimedOut,
    /// The link to the chosen agent ended while the dial was pending.
    #[error("agent connection lost during dial")]
    LinkLost,
    /// The dial request could not be handed to any matching agent's link.
    #[error("backend link is not accepting dials")]
    LinkBusy,
    /// A cap on dials in flight was reached.
    #[error("too many pending dials{}", if *.per_agent { " on this agent" } else { "" })]
    TooManyPending {
        /// Whether the agent's own cap was reached, or the process-wide one.
        per_agent: bool,
    },
    /// The dial address exceeds the length limit, so no agent was asked.
    #[error("dial address is too long")]
    TooLong,
    /// No rule of this server allows the target to the client, so no agent was asked.
    #[error(transparent)]
    Denied(Box<TargetDenied>),
    /// The agent abandoned the dial (`DIAL_CLS`).
    #[error("dial closed")]
    Closed,
    /// This server is shutting down and takes no new dials.
    #[error("server is shutting down")]
    ShuttingDown,
    /// The tunnel memory budget is used up.
    #[error("server is short of memory for tunnels")]
    NoMemory,
    /// This server is short of file descriptors and serves no further clients.
    #[error("server is short of file descriptors")]
    NoDescriptors,
}

impl DialFailure {
    /// Value of the `reason` label of `dial_failure_count`.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoAgent => "no_agent",
            Self::Target(_) => "error_response",
            Self::TimedOut | Self::SendTimedOut => "backend_dial_timeout",
            Self::LinkLost | Self::LinkBusy | Self::Closed => "backend_close",
            Self::Denied(_) => "denied",
            Self::TooManyPending { .. }
            | Self::TooLong
            | Self::ShuttingDown
            | Self::NoMemory
            | Self::NoDescriptors => "refused",
        }
    }
}
