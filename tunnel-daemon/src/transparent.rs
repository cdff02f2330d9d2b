//! The transparent frontend: connections that a packet filter's rules or the redirect lead to this server.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::ebpf::Captured;
use crate::listeners::address::listen_addr;
use crate::listeners::{Counted, Listening, Serve};
use adit_config::address::BindAddress;
use adit_config::plan::ServerPlan;
use adit_net::accept::accept_loop;
use adit_net::listen::Listener;
use adit_net::original_dst::{OriginSource, PacketFilterOrigin, accept_any_address};
use adit_server::frontend::events::FrontendContext;
use adit_server::frontend::transparent;
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
        plan: &ServerPlan,
        context: &Arc<FrontendContext>,
    ) -> anyhow::Result<(Captured, Option<SocketAddr>)> {
        let (plan, agents) = (&plan.transparent, plan.agents.port.as_ref());
        let open = |bind| self.packet_filter(bind, context);
        let bound = plan.bind.as_ref().map(open).transpose()?;
        let captured = match (&plan.redirect, agents) {
            (Some(redirect), Some(agents)) => self.redirect(redirect, &agents.bind, context)?,
            // A redirect without an agent port is refused with the flags.
            _ => Captured::none(),
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
        context: &Arc<FrontendContext>,
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
        self.process.redirect.transparent(at, no_tproxy.as_ref());
        let origins = Arc::new(PacketFilterOrigin { listener: at });
        let serve = self.proxy(origins, context);
        let serving = serve(listener, self.process.stop.clone());
        self.process.services.spawn_always("listener", serving);
        Ok(at)
    }

    /// Builds the accept loop of a transparent listener.
    pub(crate) fn proxy(
        &self,
        origins: Arc<dyn OriginSource>,
        context: &Arc<FrontendContext>,
    ) -> Serve {
        let context = Arc::clone(context);
        let events = Counted::new(self.process, ListenerLabel::Frontend);
        Arc::new(move |listener, stop| {
            let (served, origins) = (Arc::clone(&context), Arc::clone(&origins));
            let serve = move |stream: ByteStream| {
                transparent::serve(stream, Arc::clone(&served), Arc::clone(&origins))
            };
            let (clients, events) = (context.tasks.clone(), Arc::clone(&events));
            Box::pin(async move {
                // The accept loop returns the listener; dropping it closes the socket.
                drop(accept_loop(listener, None, clients, events, stop, serve).await);
            })
        })
    }
}
