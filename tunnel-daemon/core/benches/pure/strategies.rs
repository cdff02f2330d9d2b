//! The choice of an agent among 10,000.

use std::hint::black_box;

use adit_core::ids::{AgentId, LinkId};
use adit_core::registry::{Registry, Standing, Strategies};
use adit_core::target::Host;
use adit_core::wire::identifiers::Identifiers;
use criterion::{BenchmarkId, Criterion};

const AGENTS: u64 = 10_000;

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

pub(super) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("strategy-of-10000");
    let known = Host::parse(&address(AGENTS / 2));
    let inside = Host::parse(&address(AGENTS / 2).replace(".16", ".23"));
    let unknown = Host::parse("webhook.example.internal");
    for (strategies, host) in [
        ("default", &unknown),
        ("destHost", &known),
        ("destCIDR", &inside),
        ("defaultRoute", &unknown),
        ("destHost,destCIDR,defaultRoute,default", &unknown),
    ] {
        let registry = registry(strategies);
        let mut draw = 0_u64;
        group.bench_function(BenchmarkId::new("pick", strategies), |bencher| {
            bencher.iter(|| {
                draw = draw.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let link = registry.pick(black_box(host), draw, &[]);
                assert!(link.is_some(), "some agent takes it");
            });
        });
    }
    group.finish();
}
