//! The transparent frontend without eBPF: a REDIRECT rule of nftables, in a network namespace of its own.

use std::process::Command;
use std::time::{Duration, Instant};

use adit::app::{agent, server};
use adit::config::Command as Program;
use socket2::{Domain, Socket, Type};

use crate::support::client::over;
use crate::support::privilege::skip;
use crate::support::role::{Role, tell, told};
use crate::support::target::target;
use crate::support::world::{World, command, get, runtime};

const SETUP: &str = r#"set -e
ip link set lo up
nft add table ip probe
nft 'add chain ip probe out { type nat hook output priority -100; }'
nft add rule ip probe out ip daddr 127.9.9.9 tcp dport 9 redirect to :10
exec "$@""#;

#[test]
fn a_redirect_rule_of_a_packet_filter_leads_through_the_tunnel() {
    let unshare = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", SETUP, "sh"]).args(words);
        command
    };
    let probe = unshare(&["true"]).output();
    match probe {
        Ok(output) if output.status.success() => (),
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return skip("packet filter rules", &why);
        }
        Err(error) => return skip("packet filter rules", &error.to_string()),
    }
    let program = std::env::current_exe().unwrap();
    let mut role = Role::start_by(
        unshare(&[&program.display().to_string()]),
        "packet-filter",
        None,
        "",
    );
    assert_eq!(role.hear(), "peer as asked, not direct");
    assert_eq!(role.hear(), "refused: 1");
}

/// Everything in one process: only the client's source address is redirected, so the agent's own dial is not.
pub(crate) fn play() {
    let world = World::new();
    let runtime = runtime();
    let Program::Server(plan) =
        command(world.server_args(&["--transparent-bind-address=127.0.0.1:0".to_owned()]))
    else {
        panic!("no server");
    };
    let server = runtime.block_on(server::start(&plan)).unwrap();
    let listener = server.transparent.unwrap();
    let Program::Agent(plan) = command(world.agent_args(server.agents)) else {
        panic!("no agent");
    };
    let _agent = runtime.block_on(agent::start(&plan)).unwrap();
    let health = server.health.unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !get(health, "/readyz").starts_with("HTTP/1.1 200") {
        assert!(Instant::now() < deadline, "no link");
        std::thread::yield_now();
    }
    let target = target("127.9.0.1");
    let rule = format!(
        "add rule ip probe out ip saddr 127.9.0.2 ip daddr {} tcp dport {} redirect to :{}",
        target.ip(),
        target.port(),
        listener.port()
    );
    assert!(Command::new("nft").arg(rule).status().unwrap().success());
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket
        .bind(&std::net::SocketAddr::from(([127, 9, 0, 2], 0)).into())
        .unwrap();
    let seen = over(socket, target).unwrap();
    let direct = if seen.is_direct() {
        "direct"
    } else {
        "not direct"
    };
    let peer = if seen.peer == target {
        "as asked"
    } else {
        "another"
    };
    tell(&format!("peer {peer}, {direct}"));
    // Nobody redirected this one: its destination is the listener itself.
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    assert!(over(socket, listener).is_err());
    let refused = get(health, "/metrics");
    let line = refused
        .lines()
        .find_map(|line| line.strip_prefix("adit_redirect_refused_total{reason=\"own_address\"} "));
    tell(&format!("refused: {}", line.unwrap()));
    while told().is_some() {}
}
