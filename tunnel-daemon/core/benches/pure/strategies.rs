//! The choice of an agent among 10,000.

use std::hint::black_box;

use adit_core::ids::{AgentId, LinkId};
use adit_core::registry::{Registry, Standing, Strategies};
use adit_core::session::Moment;
use adit_core::target::Host;
use adit_core::wire::identifiers::Identifiers;

use crate::operation::Operation;

/// Agents of the registry.
const AGENTS: u64 = 10_000;
/// Names that are asked for in turn: what the seed of a table costs or saves one of them is evened out.
const HOSTS: u64 = 1_000;

/// Each agent claims an address of its own, a network of 16 around it, and every tenth the default route.
fn registry(strategies: &str) -> Registry {
    let strategies: Strategies = strategies.parse().expect("known names");
    let mut registry = Registry::new(strategies);
    for number in 0..AGENTS {
        let address = address(number);
        let route = if number % 10 == 0 {
            "&default-route=true"
        } else {
            ""
        };
        let claims = format!("ipv4={address}&cidr={address}/28{route}");
        let identifiers = Identifiers::parse(&claims).expect("well-formed");
        let agent = AgentId::new(&format!("agent-{number}"));
        let standing = registry.add(LinkId(number), agent, &identifiers, None);
        assert_eq!(standing, Standing::Serving);
    }
    registry
}

fn address(number: u64) -> String {
    format!("10.{}.{}.16", number / 250, number % 250)
}

/// All of this file.
pub(super) fn operations() -> impl Iterator<Item = Operation> {
    let known: fn(u64) -> String = address;
    let inside: fn(u64) -> String = |number| address(number).replace(".16", ".23");
    let unknown: fn(u64) -> String = |number| format!("webhook-{number}.example.internal");
    [
        ("default", unknown),
        ("destHost", known),
        ("destCIDR", inside),
        ("defaultRoute", unknown),
        ("destHost,destCIDR,defaultRoute,default", unknown),
    ]
    .map(|(strategies, name)| {
        Operation::new("strategy-of-10000", "pick", move || pick(strategies, name)).with(strategies)
    })
    .into_iter()
}

fn pick(strategies: &'static str, name: fn(u64) -> String) -> impl FnMut() {
    let registry = registry(strategies);
    let hosts: Vec<Host> = (0..HOSTS)
        .map(|number| Host::parse(&name(number)))
        .collect();
    let mut at = 0;
    let mut draw = 0_u64;
    move || {
        draw = draw.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let host = &hosts[at];
        at = (at + 1) % hosts.len();
        let scope = registry.scope(black_box(host), Moment::default());
        let link = scope.and_then(|scope| registry.pick(&scope, draw, &[]));
        assert!(link.is_some(), "some agent takes it");
    }
}
