//! Why a dial failed, and how far it had come: values of Adit's own series and of the log.

use adit_core::failure::{DialFailure, TargetFailure};

use super::{Label, NodeRefusal};

label! {
    /// Why a dial failed, as in `adit_dial_failures_total` and the log line `dial failed`.
    DialReason {
        /// The target refused the connection.
        Refused = "refused",
        /// The name does not exist, or has no address of the requested family.
        NoSuchHost = "no_such_host",
        /// The target, a name server or the agent did not answer in time.
        Timeout = "timeout",
        /// There is no route to the target, or no route for its address family.
        Unreachable = "unreachable",
        /// The target is missing from the allow list of the dialling end, or from the server's list for its clients.
        Denied = "denied",
        /// The agent, its link or its lane was lost before the answer, or the agent is stopping.
        AgentLost = "agent_lost",
        /// No connected agent serves the destination; at an agent, no server serves the dial.
        NoAgent = "no_agent",
        /// A limit on dials, memory or descriptors of this process or of the agent is reached.
        Overload = "overload",
        /// This server is stopping.
        Shutdown = "shutdown",
        /// Another cause, such as an address that cannot be parsed or a name server that fails.
        Other = "other",
    }

    /// How far a failed dial had come.
    DialStage {
        /// The limits of this process refused the dial before an agent was chosen.
        Admission = "admission",
        /// The rules of this server for its clients denied the target.
        ServerPolicy = "server_policy",
        /// No agent was found for the destination.
        Route = "route",
        /// The request was not sent to the agent.
        Send = "send",
        /// The request was sent, but the agent did not answer.
        Answer = "answer",
        /// The dialling end refused the request because of its limits or a malformed address.
        Request = "request",
        /// The dialling end resolved the name.
        Lookup = "lookup",
        /// The allow list of the dialling end denied the target.
        Policy = "policy",
        /// The dialling end connected to the target.
        Connect = "connect",
    }
}

impl DialReason {
    /// Reason and stage of a failure as a server sees it.
    #[must_use]
    pub fn of_failure(failure: &DialFailure) -> (Self, DialStage) {
        match failure {
            DialFailure::Denied(_) => (Self::Denied, DialStage::ServerPolicy),
            DialFailure::NoAgent | DialFailure::NoServer(_) => (Self::NoAgent, DialStage::Route),
            DialFailure::Target(text) => Self::of_answer(text),
            DialFailure::TimedOut => (Self::Timeout, DialStage::Answer),
            DialFailure::SendTimedOut => (Self::Timeout, DialStage::Send),
            DialFailure::LinkLost | DialFailure::Closed => (Self::AgentLost, DialStage::Answer),
            DialFailure::LinkBusy | DialFailure::TooManyPending { per_agent: true } => {
                (Self::Overload, DialStage::Send)
            }
            DialFailure::TooManyPending { per_agent: false }
            | DialFailure::NoMemory
            | DialFailure::NoDescriptors => (Self::Overload, DialStage::Admission),
            DialFailure::ShuttingDown => (Self::Shutdown, DialStage::Admission),
            DialFailure::TooLong => (Self::Other, DialStage::Admission),
        }
    }

    /// Reason and stage of a refused tunnel of an agent; `None`: its client gave up, which is no failure.
    #[must_use]
    pub fn of_refusal(why: NodeRefusal) -> Option<(Self, DialStage)> {
        Some(match why {
            NodeRefusal::NotAllowed => (Self::Denied, DialStage::Policy),
            NodeRefusal::NotFound => (Self::NoSuchHost, DialStage::Lookup),
            NodeRefusal::Refused => (Self::Refused, DialStage::Connect),
            NodeRefusal::Unreachable => (Self::Unreachable, DialStage::Connect),
            NodeRefusal::TimedOut => (Self::Timeout, DialStage::Connect),
            NodeRefusal::Failed => (Self::Other, DialStage::Connect),
            NodeRefusal::Limit | NodeRefusal::Descriptors | NodeRefusal::Memory => {
                (Self::Overload, DialStage::Admission)
            }
            NodeRefusal::Leaving => (Self::Shutdown, DialStage::Admission),
            NodeRefusal::NoServer | NodeRefusal::NoLanes => (Self::NoAgent, DialStage::Route),
            NodeRefusal::NoLane => (Self::Overload, DialStage::Send),
            NodeRefusal::LaneLost => (Self::AgentLost, DialStage::Answer),
            NodeRefusal::NoDestination => (Self::Other, DialStage::Admission),
            NodeRefusal::GivenUp => return None,
        })
    }

    /// Reason and stage of an agent's answer.
    #[must_use]
    pub fn of_answer(text: &str) -> (Self, DialStage) {
        match TargetFailure::of(text) {
            TargetFailure::Denied => (Self::Denied, DialStage::Policy),
            TargetFailure::NoSuchHost => (Self::NoSuchHost, DialStage::Lookup),
            TargetFailure::LookupTimedOut => (Self::Timeout, DialStage::Lookup),
            TargetFailure::Lookup => (Self::Other, DialStage::Lookup),
            TargetFailure::Refused => (Self::Refused, DialStage::Connect),
            TargetFailure::TimedOut => (Self::Timeout, DialStage::Connect),
            TargetFailure::HostUnreachable | TargetFailure::NetworkUnreachable => {
                (Self::Unreachable, DialStage::Connect)
            }
            TargetFailure::Overload => (Self::Overload, DialStage::Request),
            TargetFailure::Stopping => (Self::AgentLost, DialStage::Request),
            TargetFailure::Connect => (Self::Other, DialStage::Connect),
            TargetFailure::Other => (Self::Other, DialStage::Request),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_go_agents_have_reasons() {
        use DialReason as Why;
        use DialStage as At;
        const V4: &str = " 10.0.0.9:80";
        const V6: &str = " [fd00::1]:80";
        let resolver_refuses = "lookup x on 10.96.0.10:53: read udp 10.0.0.1:5->10.96.0.10:53: read: connection refused";
        let no_such_host = "lookup nowhere on 10.96.0.10:53: no such host";
        for (address, answer, reason, stage) in [
            (V4, "connect: connection refused", Why::Refused, At::Connect),
            ("", no_such_host, Why::NoSuchHost, At::Lookup),
            (V4, "i/o timeout", Why::Timeout, At::Connect),
            ("", "lookup slow: i/o timeout", Why::Timeout, At::Lookup),
            ("", resolver_refuses, Why::Other, At::Lookup),
            (
                V4,
                "connect: no route to host",
                Why::Unreachable,
                At::Connect,
            ),
            (
                V6,
                "connect: network is unreachable",
                Why::Unreachable,
                At::Connect,
            ),
            (V4, "connect: permission denied", Why::Other, At::Connect),
            (
                V4,
                "socket: too many open files",
                Why::Overload,
                At::Request,
            ),
        ] {
            let text = format!("dial tcp{address}: {answer}");
            assert_eq!(DialReason::of_answer(&text), (reason, stage), "{text}");
        }
        let unknown = DialReason::of_answer("dial udp: unknown network udp");
        assert_eq!(unknown, (Why::Other, At::Request));
    }
}
