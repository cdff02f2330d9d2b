//! Why a dial failed, with the text and the metric label of each cause.

use crate::destination::is_denial;
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
    /// A proxy reached none of its servers; the text says why not the last of them.
    #[error("no server answers: {0}")]
    NoServer(String),
}

/// What an agent's text says of a failed dial.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TargetFailure {
    /// The agent's allow list has no such target.
    Denied,
    /// The name does not exist, or has no address of the requested family.
    NoSuchHost,
    /// No name server answered in time.
    LookupTimedOut,
    /// The lookup failed in another way.
    Lookup,
    /// The target refused the connection.
    Refused,
    /// The target did not answer in time.
    TimedOut,
    /// There is no way to the target's host.
    HostUnreachable,
    /// There is no way to the target's network, or none for its address family.
    NetworkUnreachable,
    /// The agent is at a limit.
    Overload,
    /// The agent is stopping.
    Stopping,
    /// The connection failed in another way.
    Connect,
    /// Anything else.
    Other,
}

impl TargetFailure {
    /// Reads the text, in which both Go's dialler and Adit's write the cause last.
    #[must_use]
    pub fn of(text: &str) -> Self {
        if is_denial(text) {
            return Self::Denied;
        }
        let cause = text.rsplit(": ").next().unwrap_or(text);
        let is_lookup = text.contains(": lookup ") || text.starts_with("lookup ");
        match cause {
            "no such host" | "no suitable address found" => Self::NoSuchHost,
            "i/o timeout" | "context deadline exceeded" if is_lookup => Self::LookupTimedOut,
            // An error of a name server's socket does not concern the target.
            _ if is_lookup => Self::Lookup,
            "connection refused" => Self::Refused,
            "i/o timeout"
            | "context deadline exceeded"
            | "connection timed out"
            | "operation timed out" => Self::TimedOut,
            "no route to host" | "host is down" => Self::HostUnreachable,
            "network is unreachable"
            | "network is down"
            | "cannot assign requested address"
            | "address family not supported by protocol" => Self::NetworkUnreachable,
            "too many open files"
            | "too many open files in system"
            | "no buffer space available"
            | "cannot allocate memory"
            | "agent is short of memory for tunnels"
            | "this agent is at its limit of open targets" => Self::Overload,
            "this agent is stopping" => Self::Stopping,
            _ if text.contains(": connect: ") => Self::Connect,
            _ => Self::Other,
        }
    }
}

impl DialFailure {
    /// Whether the server or agent that answered so has not dialled, so that another one may.
    #[must_use]
    pub fn lets_others_try(&self) -> bool {
        match self {
            Self::NoAgent
            | Self::SendTimedOut
            | Self::LinkLost
            | Self::LinkBusy
            | Self::TooManyPending { .. }
            | Self::Closed
            | Self::ShuttingDown
            | Self::NoMemory
            | Self::NoDescriptors
            | Self::NoServer(_) => true,
            Self::Target(_) | Self::TimedOut | Self::TooLong | Self::Denied(_) => false,
        }
    }

    /// Whether the server that answered so is the wrong one to ask next: it is gone, going, or without agents.
    #[must_use]
    pub fn is_of_the_server(&self) -> bool {
        matches!(self, Self::NoServer(_) | Self::ShuttingDown | Self::NoAgent)
    }

    /// Value of the `reason` label of `dial_failure_count`.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoAgent | Self::NoServer(_) => "no_agent",
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
