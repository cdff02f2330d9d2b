//! Commands to a link task, and the hooks that it calls.

use std::io;
use std::sync::Arc;

use adit_core::ids::{ConnId, TunnelKey};
use adit_core::session::{CancelledDial, DialRequest, Event, LinkFailure};
use adit_core::wire::decode::StreamError;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::{Keys, Packet, PacketType};
use h2::{Reason, RecvStream, SendStream};
use tokio::sync::oneshot;

use crate::channel::Channel;
use crate::endpoint::Endpoint;
use adit_net::grpc::{code_of, words};
use adit_telemetry::labels::Segment;

/// Answer to a dial: the tunnel's connection id, or why the dial failed and whether another link may be tried.
pub type DialOutcome = Result<ConnId, CancelledDial>;

/// An agent's answer to [`LinkHooks::start_dial`]; `endpoint` receives the endpoint while the socket is still wanted.
pub struct Dialed {
    /// The tunnel that the dial is for.
    pub key: TunnelKey,
    /// Connected, or the error text for the client.
    pub outcome: Result<(), String>,
    /// Receives the endpoint for the socket, or is dropped.
    pub endpoint: oneshot::Sender<Endpoint>,
}

/// What other tasks ask of a link task.
pub enum Command {
    /// Server: dial for this channel's endpoint.
    Dial {
        /// What to dial.
        request: DialRequest,
        /// The link's side of the endpoint.
        channel: Arc<Channel>,
        /// Where the outcome goes.
        reply: oneshot::Sender<DialOutcome>,
    },
    /// Agent: a dial has ended.
    Dialed(Dialed),
    /// Agent: announce that this agent is going away.
    Drain,
    /// Agent: a newer link has replaced this one. This link stays a short while for late dials, then ends once it has no
    /// tunnel.
    Finish,
    /// End the link, resetting all tunnels.
    Stop,
    /// Server: as [`Command::Stop`]; the agent is told why.
    Revoke(String),
}

/// Callbacks from a link to its owner. Called inside the link task: must not block.
pub trait LinkHooks: Send + 'static {
    /// Agent: dial a target and send [`Command::Dialed`].
    ///
    /// # Errors
    /// The text for the client of a dial that was not started; no [`Command::Dialed`] follows.
    fn start_dial(
        &mut self,
        _key: TunnelKey,
        _protocol: String,
        _address: String,
    ) -> Result<(), String> {
        Ok(())
    }
    /// Agent: the client has given up this dial.
    fn cancel_dial(&mut self, _key: TunnelKey) {}
    /// Agent: the link has received the outcome of a dial.
    fn dial_finished(&mut self, _key: TunnelKey) {}
    /// Server: the agent sent DRAIN and prefers no new dials.
    fn peer_draining(&mut self) {}
    /// Server: the peer took nothing for the duration of a dial timeout.
    fn retired(&mut self) {}
    /// Server: the stream of a retired link takes packets again.
    fn revived(&mut self) {}
    /// A packet came, in full (`Err`: an unknown packet type).
    fn packet_in(&mut self, kind: Result<PacketType, i32>);
    /// A packet was sent.
    fn packet_out(&mut self, kind: PacketType);
    /// Whether a link that ends now does so because this process ends.
    fn shutting_down(&self) -> bool {
        false
    }
    /// A server has announced keys. False: this peer has no business to, and the packet counts as one of an unknown type.
    fn keys(&mut self, _keys: Keys) -> bool {
        false
    }
    /// Whether [`Self::idle_packet`] has one; the link's task is woken when that becomes true.
    fn has_idle_packet(&self) -> bool {
        false
    }
    /// A packet to send while no other waits.
    fn idle_packet(&mut self) -> Option<Packet> {
        None
    }
    /// A countable event.
    fn count(&mut self, event: Event);
    /// A tunnel opened.
    fn opened(&mut self, _key: TunnelKey) {}
}

/// How a link ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkExit {
    /// The peer ended its stream.
    #[error("the peer ended the stream")]
    Finished,
    /// The transport failed while the stream was read.
    #[error("{}", words(.0))]
    Transport(#[from] h2::Error),
    /// The stream failed while it was written.
    #[error("{}", words(.error))]
    Send {
        /// Cause of the failure.
        error: h2::Error,
        /// The packet that was not sent, if known.
        kind: Option<PacketType>,
    },
    /// The peer's bytes cannot be parsed.
    #[error("protocol: {0}")]
    Stream(#[from] StreamError),
    /// The session machine gave up.
    #[error("{0}")]
    Failed(#[from] LinkFailure),
    /// A newer link has replaced this one, and its last tunnel is over.
    #[error("replaced by a newer link")]
    Replaced,
    /// Ended by [`Command::Revoke`], with the reason.
    #[error("{0}")]
    Revoked(String),
    /// Agent: the server has ended the link, and says why.
    #[error("the server has ended this link: {0}")]
    RevokedByPeer(String),
    /// Stopped by [`Command::Stop`], or every handle is gone.
    #[error("stopped")]
    Stopped,
}

impl LinkExit {
    /// Whether the peer ended the link on purpose: by end of stream, or, as Go does, by a reset without an error.
    #[must_use]
    pub fn is_orderly(&self) -> bool {
        match self {
            Self::Finished | Self::RevokedByPeer(_) => true,
            Self::Transport(error) | Self::Send { error, .. } => {
                let reason = error.reason();
                let meant = matches!(reason, Some(Reason::CANCEL | Reason::NO_ERROR));
                error.is_remote() && meant
            }
            _ => false,
        }
    }

    /// Whether this end is no silence: the peer's host answered, or this process ended the link.
    #[must_use]
    pub fn breaks_silence(&self) -> bool {
        match self {
            Self::Finished
            | Self::Stream(_)
            | Self::Replaced
            | Self::Revoked(_)
            | Self::RevokedByPeer(_)
            | Self::Stopped => true,
            Self::Transport(error) | Self::Send { error, .. } => {
                let is_reset = |io: &io::Error| io.kind() == io::ErrorKind::ConnectionReset;
                error.is_remote() || error.get_io().is_some_and(is_reset)
            }
            Self::Failed(_) => false,
        }
    }

    /// How the exit counts in `stream_errors_total`: direction, code and packet. A clean end is no error. `gone` is the code
    /// that this end uses for a lost connection.
    #[must_use]
    pub fn stream_error(
        &self,
        received: Segment,
        sent: Segment,
        gone: tonic::Code,
    ) -> Option<(Segment, tonic::Code, Option<PacketType>)> {
        match self {
            Self::Finished
            | Self::RevokedByPeer(_)
            | Self::Revoked(_)
            | Self::Replaced
            | Self::Stopped => None,
            Self::Transport(error) => Some((received, code_of(error, gone), None)),
            Self::Send { error, kind } => Some((sent, code_of(error, gone), *kind)),
            Self::Stream(_) => Some((received, tonic::Code::Internal, None)),
            Self::Failed(LinkFailure::ControlOverflow) => {
                Some((sent, tonic::Code::ResourceExhausted, None))
            }
        }
    }
}

/// The two directions of a link's stream.
pub struct LinkStreams {
    /// To the peer.
    pub send: SendStream<MessageBuf>,
    /// From the peer.
    pub recv: RecvStream,
    /// Bytes of the stream's window that are never returned, so that a peer without credit has less in flight when its link is
    /// paced.
    pub withhold_bytes: usize,
}
