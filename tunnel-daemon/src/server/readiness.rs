//! Whether a server can serve, and by which of its strategies.

use std::fmt::Write as _;
use std::sync::Arc;

use adit_core::registry::{Availability, Registry, Strategy};

use crate::probes::{ALL_SILENT, NO_AGENT, NO_MATCH, Readiness};
use adit_server::router::Router;

/// Strategies in use, and whether dials find an agent by them.
type Strategies = [(Strategy, Availability)];

/// An agent of a peer counts as one of this server: a server that no agent has found yet serves at once.
///
/// With native flags an agent that responds must be there, by whatever strategy dials find it. In compat mode, as upstream, an
/// agent must be registered under the first strategy: an unready server is taken out of its own service, which locks its
/// agents out.
pub(super) fn of_agents(registry: &Registry, compat: bool) -> Readiness {
    if compat {
        let first = registry.strategies().first();
        return if registry.first_has_agent() || registry.a_peer_serves(first) {
            Readiness::Ready
        } else {
            Readiness::NotReady(NO_AGENT.into())
        };
    }
    let mut strategies = registry.strategies().iter();
    match best(&registry.availability()) {
        Availability::Ready => Readiness::Ready,
        _ if strategies.any(|strategy| registry.a_peer_serves(strategy)) => Readiness::Ready,
        Availability::Silent => Readiness::NotReady(ALL_SILENT.into()),
        Availability::None if registry.links() == 0 => Readiness::NotReady(NO_AGENT.into()),
        Availability::None => Readiness::NotReady(NO_MATCH.into()),
    }
}

fn best(strategies: &Strategies) -> Availability {
    let all = strategies.iter().map(|(_, availability)| *availability);
    all.max().unwrap_or(Availability::None)
}

/// Lines of `/readyz?verbose` about strategies and links.
pub(super) fn lines(router: &Router) -> String {
    let (strategies, silent) =
        router.with_registry(|registry| (registry.availability(), registry.silent_links()));
    let mut lines = String::new();
    for (strategy, availability) in strategies {
        let sign = if availability == Availability::Ready {
            '+'
        } else {
            '-'
        };
        let _infallible = writeln!(
            lines,
            "[{sign}]strategy {strategy}: {}",
            availability.name()
        );
    }
    let peers = router.peers();
    if !peers.is_empty() {
        let silent = peers.iter().filter(|peer| peer.is_silent()).count();
        let (all, keys) = (peers.len(), router.with_registry(Registry::peer_keys));
        let sign = if silent < all { '+' } else { '-' };
        let _infallible = writeln!(
            lines,
            "[{sign}]peers {all} linked, {silent} silent, {keys} keys"
        );
    }
    if silent > 0 {
        let _infallible = writeln!(lines, "[-]links {silent} silent: new dials avoid them");
    }
    lines
}

/// Logs which strategies find an agent, whenever that changes. Ends with the process.
pub(super) async fn log_changes(router: Arc<Router>) {
    let state = || router.with_registry(Registry::availability);
    // An agent that connects before the first look is a change, too.
    let mut known = state();
    for (_, availability) in &mut known {
        *availability = Availability::None;
    }
    loop {
        let changed = router.changed();
        let now = state();
        // When this process ends, so do its links.
        if now != known && !router.refuses_dials() {
            let strategies = list(&now);
            if best(&now) < Availability::Ready && best(&known) == Availability::Ready {
                tracing::warn!(
                    strategies,
                    "no strategy finds an agent that responds: dials fail"
                );
            } else {
                tracing::info!(strategies, "agents by strategy have changed");
            }
            known = now;
        }
        changed.await;
    }
}

fn list(strategies: &Strategies) -> String {
    let each = strategies
        .iter()
        .map(|(strategy, availability)| format!("{strategy}: {}", availability.name()));
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use adit_core::ids::{AgentId, LinkId};
    use adit_core::registry::Silence;
    use adit_core::wire::identifiers::Identifiers;

    /// A registry with one agent of these identifiers.
    fn registry(strategies: &str, identifiers: &str) -> Registry {
        let mut registry = Registry::new(strategies.parse().unwrap());
        let identifiers = Identifiers::parse(identifiers).unwrap();
        let _serving = registry.add(LinkId(1), AgentId::new("a"), &identifiers, None);
        registry
    }

    fn reason(readiness: Readiness) -> Option<String> {
        match readiness {
            Readiness::Ready | Readiness::Draining => None,
            Readiness::NotReady(reason) => Some(reason.into_owned()),
        }
    }

    #[test]
    fn a_server_is_ready_while_an_agent_of_any_strategy_responds() {
        for (strategies, identifiers) in [
            ("destHost,defaultRoute", "default-route=true"),
            ("destHost,defaultRoute", "host=a"),
            ("destCIDR,destHost,default", ""),
            ("default", ""),
        ] {
            let mut registry = registry(strategies, identifiers);
            assert_eq!(
                of_agents(&registry, false),
                Readiness::Ready,
                "{strategies}"
            );
            registry.set_silence(LinkId(1), Silence::Suspected);
            assert_eq!(
                reason(of_agents(&registry, false)).as_deref(),
                Some(ALL_SILENT),
                "{strategies}"
            );
        }
        let unmatched = registry("destHost,destCIDR", "default-route=true");
        assert_eq!(
            reason(of_agents(&unmatched, false)).as_deref(),
            Some(NO_MATCH)
        );
        let empty = Registry::new("destHost,default".parse().unwrap());
        assert_eq!(reason(of_agents(&empty, false)).as_deref(), Some(NO_AGENT));
    }

    #[test]
    fn in_compat_mode_the_first_strategy_decides_readiness() {
        let later = registry("destHost,defaultRoute", "default-route=true");
        assert_eq!(reason(of_agents(&later, true)).as_deref(), Some(NO_AGENT));
        let mut first = registry("destHost,defaultRoute", "host=a");
        first.set_silence(LinkId(1), Silence::Dead);
        assert_eq!(of_agents(&first, true), Readiness::Ready);
    }
}
