//! Original destinations of captured connections, and the rules that captured them.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::net::TcpStream;

use adit_config::plan::RedirectPlan;
use adit_net::original_dst::{OriginError, OriginSource};
use adit_redirect::redirect::Redirect;

/// Looks up the original destination in the redirect's maps.
pub(crate) struct RedirectOrigin(pub(crate) Arc<Redirect>);

impl OriginSource for RedirectOrigin {
    fn origin(&self, socket: &TcpStream, peer: SocketAddr) -> Result<SocketAddr, OriginError> {
        self.0.origin(socket, peer)?.ok_or(OriginError::Unknown)
    }
}

/// Like [`RedirectOrigin`], and also finds the rule that captured the connection.
pub(crate) struct RuleOrigin {
    pub(crate) maps: RedirectOrigin,
    /// The active rules.
    pub(crate) rules: Arc<ArcSwap<RedirectPlan>>,
}

impl OriginSource for RuleOrigin {
    fn origin(&self, socket: &TcpStream, peer: SocketAddr) -> Result<SocketAddr, OriginError> {
        self.maps.origin(socket, peer)
    }

    fn rule(&self, destination: SocketAddr) -> Option<String> {
        Some(self.rules.load().target_of(destination)?.to_string())
    }
}
