//! The transparent frontend: connections that a packet filter's rules or the redirect lead to this server.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::ebpf::Captured;
use crate::listeners::{Counted, HandshakeLog, Listening, Serve, listen_addr};
use crate::redirect_view::RedirectView;
use adit_config::address::BindAddress;
use adit_net::accept::accept_loop;
use adit_net::listen::Listener;
use adit_net::original_dst::{OriginSource, PacketFilterOrigin, accept_any_address};
use adit_net::tasks::Tasks;
use adit_server::frontend::events::FrontendContext;
use adit_server::frontend::transparent;
use adit_server::router::Router;
use adit_telemetry::labels::Listener as ListenerLabel;
use adit_tls::stream::ByteStream;
use anyhow::Context as _;

impl Listening<'_> {
    /// Opens the listeners of the plan's transparent part. Returns the address of the packet filter's listener, if any.
    ///
    /// # Errors
    /// The packet filter's listener cannot be bound, or the rule file is invalid. Other failures of the redirect are logged.
    pub(crate) fn transparent(
        &self,
        view: &Arc<RedirectView>,
        router: &Arc<Router>,
        context: &FrontendContext,
        clients: &Tasks,
    ) -> anyhow::Result<(Captured, Option<SocketAddr>)> {
        let plan = &self.plan.transparent;
        let open = |bind| self.packet_filter(bind, view, router, context, clients);
        let bound = plan.bind.as_ref().map(open).transpose()?;
        let captured = match &plan.redirect {
            Some(redirect) => self.redirect(redirect, view, router, context, clients)?,
            None => Captured::none(),
        };
        Ok((captured, bound))
    }

    /// Listens for connections that a packet filter's rules lead here. Returns the address.
    ///
    /// # Errors
    /// The address cannot be listened on.
    fn packet_filter(
        &self,
        bind: &BindAddress,
        view: &RedirectView,
        router: &Arc<Router>,
        context: &FrontendContext,
        clients: &Tasks,
    ) -> anyhow::Result<SocketAddr> {
        let listener = self
            .bind(&listen_addr(bind)?)
            .context("transparent frontend")?;
        let at = listener
            .tcp_addr()
            .context("the transparent listener has no address")?;
        let mut no_tproxy = None;
        if let Listener::Tcp(socket) = &listener
            && let Err(error) = accept_any_address(socket, at.is_ipv6())
        {
            tracing::info!(%error, "TPROXY rules cannot lead to the transparent listener, which needs CAP_NET_ADMIN; REDIRECT rules can");
            no_tproxy = Some(error);
        }
        tracing::info!(address = %at, "transparent frontend");
        view.transparent(at, no_tproxy.as_ref());
        let origins = Arc::new(PacketFilterOrigin { listener: at });
        let serve = self.proxy(origins, router, context, clients);
        self.services
            .spawn_always("listener", serve(listener, self.stop.clone()));
        Ok(at)
    }

    /// Builds the accept loop of a transparent listener.
    pub(crate) fn proxy(
        &self,
        origins: Arc<impl OriginSource>,
        router: &Arc<Router>,
        context: &FrontendContext,
        clients: &Tasks,
    ) -> Serve {
        let (router, context, clients) = (Arc::clone(router), context.clone(), clients.clone());
        let events = Arc::new(Counted {
            metrics: self.metrics.clone(),
            listener: ListenerLabel::Frontend,
            descriptors: Arc::clone(self.descriptors),
            handshakes: HandshakeLog::default(),
        });
        Arc::new(move |listener, stop| {
            let (router, context) = (Arc::clone(&router), context.clone());
            let origins = Arc::clone(&origins);
            let serve = move |stream: ByteStream| {
                let (router, context) = (Arc::clone(&router), context.clone());
                let origins = Arc::clone(&origins);
                transparent::serve(stream, router, context, origins)
            };
            let (clients, events) = (clients.clone(), Arc::clone(&events));
            Box::pin(async move {
                // The accept loop returns the listener; dropping it closes the socket.
                drop(accept_loop(listener, None, clients, events, stop, serve).await);
            })
        })
    }
}
