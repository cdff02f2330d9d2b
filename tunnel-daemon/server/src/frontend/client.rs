//! A tunnel that is open, from its client's side: what frontends without packets of their own have in common.

use std::sync::Arc;

use bytes::BytesMut;

use crate::frontend::events::ClientTunnel;
use adit_telemetry::GaugeGuard;
use adit_telemetry::labels::EndReason;
use adit_tls::stream::Connection;
use adit_tunnel::lane::Pipe;
use adit_tunnel::{Closing, Endpoint, PipeRelay, close_gracefully, copy_bidirectional};

/// A client whose dial has succeeded. Moved as a whole: each part that a future borrowed before would stay in it twice.
pub(super) struct Client<S> {
    pub(super) io: S,
    /// What it has sent before the tunnel was open.
    pub(super) early: BytesMut,
    pub(super) tunnel: ClientTunnel,
    /// For a tunnel that is a pipe.
    pub(super) relay: Option<Arc<PipeRelay>>,
    /// Where open connections are counted.
    pub(super) open: Option<GaugeGuard>,
}

impl<S: Connection> Client<S> {
    /// Moves bytes until the tunnel or the client has ended, and reports it; says how the connection is to be closed, if it
    /// has not failed. `endpoint` is empty then: what it held is accounted for until it goes. A cancelled call leaves both to
    /// their `Drop`: the tunnel is reset.
    pub(super) async fn copy_bidirectional(
        &mut self,
        endpoint: &mut Option<Endpoint>,
    ) -> Option<Closing> {
        let Self {
            io, early, tunnel, ..
        } = self;
        let outcome = copy_bidirectional(io, endpoint.as_mut()?, early.split().freeze()).await;
        let reason = outcome.reason_at_client();
        tunnel.ended(outcome.from_socket, outcome.to_socket, reason);
        *endpoint = None;
        outcome.closing()
    }

    /// Closes the connection, but for dropping it. A target that broke off must not look like one that closed, not even for
    /// a moment.
    pub(super) async fn close(&mut self, closing: Closing) {
        close_gracefully(&mut self.io, closing).await;
    }

    /// Hands both sockets over to relay threads, to the end. A cancelled call resets them.
    pub(super) async fn splice(self, pipe: Pipe) {
        let Self {
            io,
            early,
            mut tunnel,
            relay,
            open: _open,
        } = self;
        // Without a relay nobody asks for a pipe, which resets when it is dropped.
        let (Some(relay), Some(socket), Some(live)) = (relay, io.into_descriptor(), tunnel.live())
        else {
            return tunnel.cut(EndReason::RelayFailed);
        };
        let outcome = relay.run(socket, early.freeze(), pipe, &live).await;
        tracing::debug!(end = ?outcome.end, "relayed tunnel over");
        tunnel.moved_by(outcome.engine, outcome.driver, outcome.driver_reason);
        let (from_client, to_client) = (outcome.from_socket, outcome.to_socket);
        tunnel.ended(from_client, to_client, outcome.end.reason());
    }
}
