//! Label values as enums, so that the number of series is bounded at compile time.
//!
//! Only this module knows upstream's spelling. Adding a value takes one line in its list.

use adit_core::failure::DialFailure;

/// A label with a fixed set of values, by which counters cache series.
pub trait Label: Copy + Eq + 'static {
    /// Every value, in the order of [`Label::index`].
    const ALL: &'static [Self];
    /// Spelling in a scrape.
    fn as_str(self) -> &'static str;
    /// Position in [`Label::ALL`].
    fn index(self) -> usize;
    /// Its description on the metrics page.
    #[cfg(test)]
    fn meaning(self) -> &'static str;
}

/// Declares label enums with the spelling of each value.
macro_rules! label {
    ($($(#[$doc:meta])* $name:ident { $($(#[doc = $value_doc:literal])* $value:ident = $text:literal,)+ })+) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name { $($(#[doc = $value_doc])* $value,)+ }

        impl Label for $name {
            const ALL: &'static [Self] = &[$(Self::$value,)+];

            fn as_str(self) -> &'static str {
                match self { $(Self::$value => $text,)+ }
            }

            fn index(self) -> usize {
                self as usize
            }

            #[cfg(test)]
            fn meaning(self) -> &'static str {
                match self { $(Self::$value => concat!($($value_doc),*),)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    )+ };
}

mod agent;
mod dial;
mod kernel;
mod lane;
mod offence;
mod tunnel;

pub use agent::{AgentDial, AgentRefusal, LinkEnding, TokenReview};
pub use dial::{DialReason, DialStage};
pub use kernel::{
    AccountLoss, AccountRole, NetnsHelperState, NetnsState, RedirectRefusal, RedirectState,
};
pub use lane::{LaneCloseReason, LaneDial, LaneRefusal, LaneState};
pub use offence::Offence;
pub use tunnel::{EndClass, EndReason};

label! {
    /// Where a packet was seen, and in which direction.
    Segment {
        /// Read from a gRPC client.
        FromClient = "from_client",
        /// Written to a gRPC client.
        ToClient = "to_client",
        /// Read from an agent by a server, or sent by an agent.
        FromAgent = "from_agent",
        /// Written to an agent by a server, or received by an agent.
        ToAgent = "to_agent",
    }

    /// The gRPC method of a stream.
    ServiceMethod {
        /// `ProxyService/Proxy`: a client's tunnel.
        Proxy = "Proxy",
        /// `AgentService/Connect`: an agent's link.
        Connect = "Connect",
    }

    /// Why a dial failed, as in `dial_failure_count`. One dial may count under several reasons.
    DialFailureReason {
        /// No strategy found an agent.
        NoAgent = "no_agent",
        /// The agent answered with an error.
        ErrorResponse = "error_response",
        /// The agent answered an unknown dial.
        UnrecognizedResponse = "unrecognized_response",
        /// The answer could not be written to the client.
        SendRsp = "send_rsp",
        /// The agent gave up the dial, or its link was lost.
        BackendClose = "backend_close",
        /// The agent did not answer within the dial deadline.
        BackendDialTimeout = "backend_dial_timeout",
        /// The client left before the answer.
        FrontendClose = "frontend_close",
        /// A limit or a shutdown refused the dial; upstream has no such value.
        Refused = "refused",
        /// No rule of this server allows the target to the client; upstream has no such value.
        Denied = "denied",
    }
}

impl From<&DialFailure> for DialFailureReason {
    /// The reason named by [`DialFailure::reason`]; a name missing in this list counts as a lost backend.
    fn from(failure: &DialFailure) -> Self {
        let name = failure.reason();
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.as_str() == name)
            .unwrap_or(Self::BackendClose)
    }
}

label! {
    /// Why an agent could not reach a target, as upstream's agent distinguishes it.
    EndpointDialFailure {
        /// The dial deadline passed.
        Timeout = "timeout",
        /// Another cause.
        Unknown = "unknown",
    }

    /// Direction of a failed send or receive on an agent's link (deprecated upstream, still scraped).
    LinkDirection {
        /// Sending to the server failed.
        ToServer = "to_server",
        /// Receiving from the server failed.
        FromServer = "from_server",
    }

    /// Direction of a tunnel's bytes.
    Direction {
        /// From the client to the target.
        ToTarget = "to_target",
        /// From the target to the client.
        ToClient = "to_client",
    }

    /// Implementation of a link's peer: decides credit, half-close and budgets.
    PeerKind {
        /// Adit, which negotiated `adit-link`.
        Adit = "adit",
        /// A Go agent or server.
        Go = "go",
    }

    /// Path of a tunnel's bytes between server and agent.
    Path {
        /// The link, shared with the agent's other tunnels.
        Link = "link",
        /// A lane for this tunnel alone.
        Lane = "lane",
        /// A plaintext raw lane for this tunnel alone, without frames.
        RawLane = "raw-lane",
        /// A kTLS raw lane for this tunnel alone, without frames.
        KtlsLane = "ktls-lane",
        /// A connection to a server, for a client of `adit proxy`.
        Server = "server",
        /// A lane of another server, which has the agent.
        Peer = "peer",
    }

    /// Direction of a link between servers.
    PeerDirection {
        /// This server asks.
        To = "to",
        /// The other server asks.
        From = "from",
    }

    /// State of an address of peers.
    PeerAddressState {
        /// There is a link to the server there.
        Linked = "linked",
        /// There is no link.
        Failed = "failed",
        /// The address leads to this server itself.
        Own = "own",
    }

    /// Result of a dial that one server forwards to another.
    PeerDial {
        /// The tunnel is open.
        Opened = "opened",
        /// No agent there under the key; nobody was asked.
        NotHere = "not_here",
        /// The dial failed there.
        Failed = "failed",
        /// The dial was not forwarded, or refused for what it says: nobody was asked.
        Refused = "refused",
    }

    /// Which limit refused a dial.
    DialCap {
        /// Limit on dials in flight of one agent.
        PerAgent = "per_agent",
        /// Limit on dials in flight in this process.
        Process = "process",
        /// This process is shutting down.
        Shutdown = "shutdown",
        /// Limit on file descriptors of this process.
        Descriptors = "descriptors",
        /// Limit on memory for tunnels of this process.
        Memory = "memory",
    }

    /// Why a dial asked another agent.
    DialRetry {
        /// The dial could not be sent to the previous agent.
        NotSent = "not_sent",
        /// The previous agent was slow to answer; the dial was hedged.
        Slow = "slow",
        /// The previous agent was silent.
        Silent = "silent",
        /// The link of the previous agent ended.
        Lost = "lost",
    }

    /// Outcome of loading changed TLS files.
    ReloadResult {
        /// The new files are in use.
        Ok = "ok",
        /// The new files are broken; the old files stay in use.
        Failed = "failed",
    }

    /// The listener of an accept(2) error or a refused connection.
    Listener {
        /// Frontends.
        Frontend = "frontend",
        /// The agent port.
        Agent = "agent",
        /// Health port, admin port and admin socket.
        Admin = "admin",
        /// Listeners of an agent for the control plane.
        Node = "node",
        /// The port for other servers.
        Peer = "peer",
    }

    /// Why a connection to a TLS listener got no TLS session.
    HandshakeFailure {
        /// The peer sent nothing in time.
        Silent = "silent",
        /// Closed as the oldest silent connection, to make room for newer connections.
        CrowdedOut = "crowded_out",
        /// The peer closed the connection before it sent a byte.
        Closed = "closed",
        /// No handshake slot was free in time.
        NoSlot = "no_slot",
        /// Too many connections waited for a handshake, most of them from the same address.
        TooMany = "too_many",
        /// The handshake stalled while other connections waited for a slot.
        Stalled = "stalled",
        /// The handshake began but did not finish in time.
        TimedOut = "timed_out",
        /// The handshake failed because of a certificate, a protocol or a peer without TLS.
        Failed = "failed",
    }

    /// The dialect a client speaks.
    ClientDialect {
        /// `ProxyService/Proxy` packets.
        Grpc = "grpc",
        /// HTTP `CONNECT` as kube-apiserver sends it.
        HttpConnect = "http-connect",
        /// HTTP requests with a whole URL, and `CONNECT`.
        HttpProxy = "http-proxy",
        /// SOCKS5.
        Socks5 = "socks5",
        /// Redirected connections with a recorded original destination.
        Transparent = "transparent",
        /// A listener of an agent; the agent opens the tunnel.
        Node = "node",
        /// Another server, which forwards a dial of its client.
        Peer = "peer",
    }

    /// Which end asked for a tunnel.
    OpenedBy {
        /// The server, for a client of one of its frontends.
        Client = "client",
        /// An agent, for a client of one of its listeners.
        Agent = "agent",
        /// Another server, for a client of one of its frontends.
        Peer = "peer",
    }

    /// Why a tunnel requested by an agent was not opened.
    NodeRefusal {
        /// The server does not allow the destination.
        NotAllowed = "not_allowed",
        /// The destination's name has no address.
        NotFound = "not_found",
        /// The destination refused the connection.
        Refused = "refused",
        /// There is no route to the destination.
        Unreachable = "unreachable",
        /// The destination or the server did not answer in time.
        TimedOut = "timed_out",
        /// The connection to the destination failed in another way.
        Failed = "failed",
        /// A limit on connections, dials, tunnels or their rate is reached.
        Limit = "limit",
        /// Memory for tunnels runs low.
        Memory = "memory",
        /// File descriptors run low.
        Descriptors = "descriptors",
        /// The server is stopping.
        Leaving = "leaving",
        /// Agent: no server is connected.
        NoServer = "no_server",
        /// Agent: no connected server accepts lanes.
        NoLanes = "no_lanes",
        /// Agent: no lane was free in time.
        NoLane = "no_lane",
        /// Agent: several lanes in a row were lost before the answer.
        LaneLost = "lane_lost",
        /// Agent: the original destination is unknown.
        NoDestination = "no_destination",
        /// The client gave up before the answer.
        GivenUp = "given_up",
    }
}

impl NodeRefusal {
    /// The reason as a text for a log line.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::NotAllowed => {
                "--allowed-destination of the server does not allow the destination"
            }
            Self::NotFound => "the name of the destination has no address",
            Self::Refused => "the destination refused the connection",
            Self::Unreachable => "there is no route to the destination",
            Self::TimedOut => "the destination or the server did not answer in time",
            Self::Failed => "the connection to the destination failed",
            Self::Limit => "a limit on connections, dials or tunnels is reached",
            Self::Memory => "memory for tunnels runs low",
            Self::Descriptors => "file descriptors run low",
            Self::Leaving => "the server is stopping",
            Self::NoServer => "no server is connected",
            Self::NoLanes => "no connected server takes lanes",
            Self::NoLane => "no lane was free in time",
            Self::LaneLost => "lanes were lost before the answer",
            Self::NoDestination => "the destination of the connection is not known",
            Self::GivenUp => "the client closed the connection before the answer",
        }
    }
}

label! {
    /// What moves a tunnel's bytes.
    Engine {
        /// Bytes copied or packets rewritten in user space.
        Copy = "copy",
        /// splice(2) between two sockets.
        Splice = "splice",
    }

    /// The use of a certificate file.
    CertificateKind {
        /// Shown to peers.
        Certificate = "certificate",
        /// Verifies peers.
        Ca = "ca",
    }

    /// What polls a tunnel's sockets.
    Driver {
        /// The task of the tunnel's client or target.
        Task = "task",
        /// A relay thread with epoll.
        Epoll = "epoll",
        /// A relay thread with io_uring.
        IoUring = "io-uring",
    }

    /// Why a tunnel, or the relay threads, use their driver.
    DriverReason {
        /// The tunnel uses frames, which only its task handles; also for a dial that opened no tunnel.
        Framed = "framed",
        /// The configuration names the engine.
        Asked = "asked",
        /// Both engines are available, and measurements favour the chosen engine.
        Measured = "measured",
        /// A seccomp profile or a sysctl forbids io_uring.
        Forbidden = "forbidden",
        /// The kernel lacks or hides io_uring.
        Kernel = "kernel",
        /// Memory or descriptors are too short for io_uring.
        Resources = "resources",
        /// io_uring failed in another way.
        Other = "other",
    }
}

/// A gRPC code in Go's spelling: `Canceled` with one `l`, `OK` in capitals.
#[must_use]
pub fn go_code(code: tonic::Code) -> &'static str {
    match code {
        tonic::Code::Ok => "OK",
        tonic::Code::Cancelled => "Canceled",
        tonic::Code::Unknown => "Unknown",
        tonic::Code::InvalidArgument => "InvalidArgument",
        tonic::Code::DeadlineExceeded => "DeadlineExceeded",
        tonic::Code::NotFound => "NotFound",
        tonic::Code::AlreadyExists => "AlreadyExists",
        tonic::Code::PermissionDenied => "PermissionDenied",
        tonic::Code::ResourceExhausted => "ResourceExhausted",
        tonic::Code::FailedPrecondition => "FailedPrecondition",
        tonic::Code::Aborted => "Aborted",
        tonic::Code::OutOfRange => "OutOfRange",
        tonic::Code::Unimplemented => "Unimplemented",
        tonic::Code::Internal => "Internal",
        tonic::Code::Unavailable => "Unavailable",
        tonic::Code::DataLoss => "DataLoss",
        tonic::Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use adit_core::grant::ClientRules;

    use super::*;

    fn indexes_match_positions<L: Label>() {
        for (position, value) in L::ALL.iter().enumerate() {
            assert_eq!(value.index(), position, "{}", value.as_str());
        }
    }

    #[test]
    fn every_label_is_found_at_its_own_index() {
        indexes_match_positions::<Segment>();
        indexes_match_positions::<DialFailureReason>();
        indexes_match_positions::<DialReason>();
        indexes_match_positions::<DialStage>();
        indexes_match_positions::<EndReason>();
        indexes_match_positions::<EndClass>();
        indexes_match_positions::<HandshakeFailure>();
        indexes_match_positions::<ClientDialect>();
    }

    fn denied() -> DialFailure {
        let rules = ClientRules::parse(&["10.0.0.1"]).unwrap();
        let targets = rules.of_client(None).unwrap();
        let denied = targets.check("tcp", "10.0.0.2:80").unwrap_err();
        DialFailure::Denied(Box::new(denied))
    }

    #[test]
    fn every_dial_failure_has_its_own_reason_in_the_list() {
        let failures = [
            DialFailure::NoAgent,
            DialFailure::Target("x".to_owned()),
            DialFailure::TimedOut,
            DialFailure::SendTimedOut,
            DialFailure::LinkLost,
            DialFailure::LinkBusy,
            DialFailure::TooManyPending { per_agent: true },
            DialFailure::TooLong,
            DialFailure::Closed,
            DialFailure::ShuttingDown,
            DialFailure::NoDescriptors,
            denied(),
        ];
        for failure in &failures {
            assert_eq!(DialFailureReason::from(failure).as_str(), failure.reason());
        }
    }

    #[test]
    fn codes_are_spelled_as_go_does() {
        assert_eq!(go_code(tonic::Code::Cancelled), "Canceled");
        assert_eq!(go_code(tonic::Code::Ok), "OK");
    }
}
