//! Where captured connections wanted to go, and by which rule they came.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::net::TcpStream;

use adit_config::plan::RedirectPlan;
use adit_net::original_dst::{OriginError, OriginSource};
use adit_redirect::redirect::Redirect;

/// Asks the maps of the redirect.
pub(crate) struct RedirectOrigin(pub(crate) Arc<Redirect>);

impl OriginSource for RedirectOrigin {
    fn origin(&self, socket: &TcpStream, peer: SocketAddr) -> Result<SocketAddr, OriginError> {
        self.0.origin(socket, peer)?.ok_or(OriginError::Unknown)
    }
}

/// As that, and knows the rules that captured them.
pub(crate) struct RuleOrigin {
    pub(crate) maps: RedirectOrigin,
    /// Those in force.
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
