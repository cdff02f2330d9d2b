//! The transparent frontend without eBPF: REDIRECT and TPROXY rules of nftables, in their own network namespace.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use adit::agent::{self, RunningAgent};
use adit::server::{self, RunningServer};
use socket2::{Domain, Socket, Type};
use tokio::runtime::Runtime;

use crate::support::blocking;
use crate::support::client::{Seen, over};
use crate::support::privilege::{ready, skip};
use crate::support::role::{Role, tell, told};
use crate::support::target::target;
use crate::support::wait::until;
use crate::support::world::{World, agent_plan, get, is_ready, runtime, sample, server_plan};

/// Clients that the kernel accounts for. They have no destination class, because no rule of Adit redirected them.
const CLIENTS: &str = r#"adit_ebpf_connections_total{agent="kernel",destination_class="",role="client",tenant="default"}"#;

/// Addresses of clients and targets.
const V6_ADDRESSES: &str = "ip -6 address add fd00:9::1/128 dev lo nodad
ip -6 address add fd00:9::2/128 dev lo nodad";

/// Creates a table of a family. Its first rule only probes whether the kernel supports REDIRECT.
fn redirect(table: &str) -> String {
    let addresses = if table == "ip" { "" } else { V6_ADDRESSES };
    format!(
        r#"set -e
ip link set lo up
{addresses}
nft add table {table} probe
nft 'add chain {table} probe out {{ type nat hook output priority -100; }}'
nft add rule {table} probe out tcp dport 9 redirect to :10
exec "$@""#
    )
}

/// Packets that a process sends to its own host arrive on loopback, where prerouting rules apply.
fn tproxy() -> String {
    format!(
        r#"set -e
ip link set lo up
{V6_ADDRESSES}
nft add table inet probe
nft 'add chain inet probe in {{ type filter hook prerouting priority mangle; }}'
nft add rule inet probe in ip daddr 127.9.9.9 tcp dport 9 tproxy ip to :10
nft add rule inet probe in ip6 daddr fd00:9::9 tcp dport 9 tproxy ip6 to :10
exec "$@""#
    )
}

/// Addresses of client, target and listener, for one address family.
struct Ends {
    /// The name of the family in rules.
    family: &'static str,
    client: &'static str,
    target: &'static str,
    /// Address of the listener.
    loopback: &'static str,
}

const V4: Ends = Ends {
    family: "ip",
    client: "127.9.0.2",
    target: "127.9.0.1",
    loopback: "127.0.0.1",
};
const V6: Ends = Ends {
    family: "ip6",
    client: "fd00:9::2",
    target: "fd00:9::1",
    loopback: "::1",
};

/// Starts the role in a namespace with these rules. Returns `None` and prints the reason where the kernel lacks them.
fn behind(setup: &str, what: &str, role: &str, arguments: &str) -> Option<Role> {
    let unshare = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", setup, "sh"]).args(words);
        command
    };
    let why = match unshare(&["true"]).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(error.to_string()),
    };
    if let Some(why) = why {
        skip(what, why);
        return None;
    }
    let program = std::env::current_exe().unwrap().display().to_string();
    Some(Role::start_by(unshare(&[&program]), role, None, arguments))
}

/// Checks that the kernel accounted for `clients` clients, where accounting is available.
fn are_accounted_for(role: &mut Role, what: &str, clients: u32) {
    if ready(&format!("accounting for clients that come by {what}")) {
        assert_eq!(role.hear(), format!("accounted for: {clients}"));
    }
}

/// Limit (redirect): REDIRECT and TPROXY rules of a packet filter | lead to the listener as eBPF does
#[test]
fn a_redirect_rule_of_a_packet_filter_leads_through_the_tunnel() {
    leads_through_the_tunnel("packet filter rules", "ip 127.0.0.1:0", 1, 1);
}

/// Limit (redirect): REDIRECT and TPROXY rules of a packet filter
#[test]
fn a_redirect_rule_of_ipv6_leads_through_the_tunnel() {
    leads_through_the_tunnel("packet filter rules of IPv6", "ip6 [::1]:0", 1, 1);
}

/// Limit (redirect): REDIRECT and TPROXY rules of a packet filter
#[test]
fn redirect_rules_of_both_families_lead_to_one_listener() {
    // Calls of IPv4, of IPv4 as IPv6, and of IPv6.
    leads_through_the_tunnel("packet filter rules of both families", "inet [::]:0", 3, 2);
}

/// `arguments` are a table, and where the listener is. Some of its clients are refused.
fn leads_through_the_tunnel(what: &str, arguments: &str, clients: u32, refused: u32) {
    let (table, _listener) = arguments.split_once(' ').unwrap();
    let Some(mut role) = behind(&redirect(table), what, "packet-filter", arguments) else {
        return;
    };
    for _call in 0..clients {
        assert_eq!(role.hear(), "peer as asked, not direct");
    }
    assert_eq!(role.hear(), format!("refused: {refused}"));
    are_accounted_for(&mut role, what, clients);
}

/// Limit (redirect): REDIRECT and TPROXY rules of a packet filter
#[test]
fn tproxy_rules_lead_through_the_tunnel_over_either_family() {
    let Some(mut role) = behind(&tproxy(), "TPROXY rules", "tproxy", "") else {
        return;
    };
    for _family in ["IPv4", "IPv6"] {
        assert_eq!(role.hear(), "peer as asked, direct");
        assert_eq!(role.hear(), "peer as asked, not direct");
    }
}

/// Server, agent and targets run in one process. The rules match the client's source address, so the agent's dial does not
/// match.
struct Stand {
    _world: World,
    runtime: Runtime,
    _server: RunningServer,
    _agent: RunningAgent,
    health: SocketAddr,
    listener: SocketAddr,
}

impl Stand {
    fn start(bind: &str) -> Self {
        let world = World::new();
        let runtime = runtime();
        let flags = [
            format!("--transparent-bind-address={bind}"),
            "--account=on".to_owned(),
        ];
        let plan = server_plan(&world.server_args(&flags));
        let server = runtime.block_on(server::start(&plan)).unwrap();
        let plan = agent_plan(&world.agent_args(server.agents));
        let agent = runtime.block_on(agent::start(&plan)).unwrap();
        let (health, listener) = (server.health.unwrap(), server.transparent.unwrap());
        let linked = || is_ready(health).then_some(());
        blocking::until("a link", Duration::from_secs(20), linked);
        Self {
            _world: world,
            runtime,
            _server: server,
            _agent: agent,
            health,
            listener,
        }
    }

    /// Returns the number of accounted clients. If accounting works, it waits for `clients` first.
    fn accounted(&self, clients: u32) -> f64 {
        let now = |series: &str| sample(self.health, series).unwrap_or(0.0);
        if now("adit_ebpf_account_attached") == 1.0 {
            let all = || now(CLIENTS) == f64::from(clients);
            let state = || get(self.health, "/metrics");
            self.runtime.block_on(until("ends of clients", all, state));
        }
        now(CLIENTS)
    }
}

fn nft(rule: &str) {
    assert!(Command::new("nft").arg(rule).status().unwrap().success());
}

/// Connects from the source address that the rules match.
fn call(from: &str, to: SocketAddr) -> std::io::Result<Seen> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
    let from = SocketAddr::new(from.parse().unwrap(), 0);
    socket.bind(&from.into()).unwrap();
    over(socket, to)
}

fn tell_seen(seen: &Seen, asked: SocketAddr) {
    let direct = if seen.is_direct() {
        "direct"
    } else {
        "not direct"
    };
    let peer = if seen.peer == asked {
        "as asked"
    } else {
        "another"
    };
    tell(&format!("peer {peer}, {direct}"));
}

/// The address as an IPv6 socket shows it.
fn mapped(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().into(),
        IpAddr::V6(_) => ip,
    }
}

pub(crate) fn play(arguments: &str) {
    let (table, bind) = arguments.split_once(' ').unwrap();
    let families: &[Ends] = match table {
        "ip" => &[V4],
        "ip6" => &[V6],
        _ => &[V4, V6],
    };
    let stand = Stand::start(bind);
    let port = stand.listener.port();
    let mut clients = 0;
    for ends in families {
        let (family, client, target) = (ends.family, ends.client, target(ends.target));
        nft(&format!(
            "add rule {table} probe out {family} saddr {client} {family} daddr {} tcp dport {} redirect to :{port}",
            target.ip(),
            target.port()
        ));
        tell_seen(&call(client, target).unwrap(), target);
        clients += 1;
        if table == "inet" && target.is_ipv4() {
            let client = mapped(client.parse().unwrap()).to_string();
            let asked = SocketAddr::new(mapped(target.ip()), target.port());
            tell_seen(&call(&client, asked).unwrap(), asked);
            clients += 1;
        }
        // This call is not redirected, so its destination is the listener itself.
        let listener = SocketAddr::new(ends.loopback.parse().unwrap(), port);
        assert!(call(ends.target, listener).is_err());
    }
    let refused = get(stand.health, "/metrics");
    let line = refused
        .lines()
        .find_map(|line| line.strip_prefix("adit_redirect_refused_total{reason=\"own_address\"} "));
    tell(&format!("refused: {}", line.unwrap()));
    tell(&format!("accounted for: {}", stand.accounted(clients)));
    while told().is_some() {}
}

pub(crate) fn play_tproxy() {
    let stand = Stand::start("[::]:0");
    let port = stand.listener.port();
    for Ends {
        family,
        client,
        target: at,
        ..
    } in [V4, V6]
    {
        let target = target(at);
        tell_seen(&call(client, target).unwrap(), target);
        let rule = format!(
            "add rule inet probe in {family} saddr {client} tcp dport {} tproxy {family} to :{port}",
            target.port()
        );
        nft(&rule);
        tell_seen(&call(client, target).unwrap(), target);
    }
    while told().is_some() {}
}
