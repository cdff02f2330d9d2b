//! Agents connect to all servers of a fleet whose size changes. They learn its size from leases, or from the servers' flag.

use std::path::Path;

use rustix::process::Signal;

use crate::balance::balance;
use crate::cluster::{AUDIENCE, Cluster, MadeBy, Mode, flag};
use crate::ports;
use crate::process::Process;
use crate::server::Server;
use crate::wait::{secs, until};

fn leases(cluster: &Cluster) -> Vec<String> {
    let label = ["-l", "k8s-app=konnectivity-server", "-o", "name"];
    let names = [&["get", "leases", "-n", "kube-system"][..], &label].concat();
    let names = cluster.kubectl(&names, None);
    names.lines().map(str::to_owned).collect()
}

fn published(cluster: &Cluster, count: usize) {
    until(&format!("{count} leases"), secs(30), || {
        (leases(cluster).len() == count).then_some(())
    });
}

/// Three servers become one and then three again, each at its own address.
///
/// Upstream (configuration): Agents follow the leases of their servers from one to three servers and back.
#[test]
fn an_agent_follows_the_leases_of_servers() {
    let Some(cluster) = Cluster::of("leases", Mode::Grpc) else {
        return;
    };
    let socket = |n: usize| flag("uds-name", cluster.path(&format!("egress-{n}.sock")));
    let start = |n: usize| -> Server {
        let socket = socket(n);
        let id = format!("--server-id=server-{n}");
        cluster.server("proxy-server", &["--enable-lease-controller", &socket, &id])
    };
    let mut servers: Vec<Server> = (0..3).map(start).collect();
    published(&cluster, 3);
    let audience = ["--audience", AUDIENCE];
    let token = cluster.token("kube-system", "konnectivity-agent", &audience);
    let file = cluster.token_file("agent.token", &token);
    let mut args = cluster.agent_args("127.0.0.1", servers[0].agents, &file);
    for server in &servers[1..] {
        args.push(format!("--proxy-server-host=127.0.0.1:{}", server.agents));
    }
    args.extend([
        "--count-server-leases".to_owned(),
        format!("--kubeconfig={}", cluster.kubeconfig("agent").display()),
        "--sync-forever".to_owned(),
    ]);
    let adit = Path::new(env!("CARGO_BIN_EXE_adit"));
    let _agent = Process::service("agent", adit, &args, cluster.dir.path());
    for server in &servers {
        server.links(1.0);
    }
    let ports: Vec<u16> = servers.iter().map(|server| server.agents).collect();
    for mut gone in servers.drain(1..) {
        gone.process.signal(Signal::TERM);
        gone.process.wait(secs(20));
    }
    // The servers have deleted their leases, instead of letting them expire.
    published(&cluster, 1);
    servers[0].links(1.0);
    for (n, port) in ports.iter().enumerate().skip(1) {
        let (id, port) = (
            format!("--server-id=again-{n}"),
            format!("--agent-port={port}"),
        );
        let flags: [&str; 4] = [&id, &port, &socket(n), "--enable-lease-controller"];
        servers.push(cluster.server("proxy-server", &flags));
    }
    published(&cluster, 3);
    for server in &servers {
        server.links(1.0);
    }
    // A killed server leaves its lease behind, and the other servers delete it.
    let mut killed = servers.pop().expect("a server");
    killed.process.kill();
    until("the collection of an expired lease", secs(90), || {
        (leases(&cluster).len() == 2).then_some(())
    });
}

/// Two servers and two agents become four of each. Servers restart with the new count, as platforms do it.
///
/// Upstream (configuration): Agents follow a static server count.
#[test]
fn agents_follow_the_server_count_flag() {
    let Some(cluster) = Cluster::of("static count", Mode::Grpc) else {
        return;
    };
    let places = [(); 4].map(|()| [(); 3].map(|()| ports::free()));
    let balancer = balance(0, places.iter().map(|[agents, ..]| *agents).collect());
    let start_server = |n: usize, count: usize| -> Server {
        let flags = [
            flag("uds-name", cluster.path(&format!("egress-{n}.sock"))),
            format!("--server-id=server-{n}"),
            format!("--server-count={count}"),
        ];
        cluster.server_at(MadeBy::Adit, places[n], &flags)
    };
    let audience = ["--audience", AUDIENCE];
    let token = cluster.token("kube-system", "konnectivity-agent", &audience);
    let file = cluster.token_file("agent.token", &token);
    let start_agent = |n: usize| {
        let mut args = cluster.agent_args("127.0.0.1", balancer, &file);
        args.push(format!("--agent-id=agent-{n}"));
        let adit = Path::new(env!("CARGO_BIN_EXE_adit"));
        Process::service(&format!("agent-{n}"), adit, &args, cluster.dir.path())
    };
    let mut servers: Vec<Server> = (0..2).map(|n| start_server(n, 2)).collect();
    let mut agents: Vec<Process> = (0..2).map(start_agent).collect();
    for server in &servers {
        server.links(2.0);
    }
    servers.extend((2..4).map(|n| start_server(n, 4)));
    for (n, server) in servers.iter_mut().enumerate().take(2) {
        server.process.signal(Signal::TERM);
        server.process.wait(secs(20));
        *server = start_server(n, 4);
    }
    agents.extend((2..4).map(start_agent));
    for server in &servers {
        server.links(4.0);
    }
}
