//! Servers and agents that know of each other by leases.

use std::path::Path;

use rustix::process::Signal;

use crate::cluster::{AUDIENCE, Cluster, Mode, programs};
use crate::process::Process;
use crate::server::Server;
use crate::wait::{secs, until};

fn leases(cluster: &Cluster) -> Vec<String> {
    let names = [
        "get",
        "leases",
        "-n",
        "kube-system",
        "-l",
        "k8s-app=konnectivity-server",
        "-o",
        "name",
    ];
    cluster
        .kubectl(&names, None)
        .lines()
        .map(str::to_owned)
        .collect()
}

fn published(cluster: &Cluster, count: usize) {
    until(&format!("{count} leases"), secs(30), || {
        (leases(cluster).len() == count).then_some(())
    });
}

/// 3 -> 1 -> 3, each server at an address of its own.
#[test]
fn an_agent_follows_the_leases_of_servers() {
    let Some(programs) = programs("leases") else {
        return;
    };
    let cluster = Cluster::start(programs, Mode::Grpc);
    let start = |n: usize| -> Server {
        let socket = format!(
            "--uds-name={}",
            cluster.path(&format!("egress-{n}.sock")).display()
        );
        let id = format!("--server-id=server-{n}");
        cluster.server("proxy-server", &["--enable-lease-controller", &socket, &id])
    };
    let mut servers: Vec<Server> = (0..3).map(start).collect();
    published(&cluster, 3);
    let token = cluster.token(
        "kube-system",
        "konnectivity-agent",
        &["--audience", AUDIENCE],
    );
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
    // Withdrawn, and not just expired.
    published(&cluster, 1);
    servers[0].links(1.0);
    for (n, port) in ports.iter().enumerate().skip(1) {
        let socket = format!(
            "--uds-name={}",
            cluster.path(&format!("egress-{n}.sock")).display()
        );
        let flags = [
            format!("--server-id=again-{n}"),
            format!("--agent-port={port}"),
            socket,
        ];
        let flags: Vec<&str> = flags
            .iter()
            .map(String::as_str)
            .chain(["--enable-lease-controller"])
            .collect();
        servers.push(cluster.server("proxy-server", &flags));
    }
    published(&cluster, 3);
    for server in &servers {
        server.links(1.0);
    }
    // One that is killed leaves a lease behind, which the others collect.
    let mut killed = servers.pop().expect("a server");
    killed.process.kill();
    until("the collection of an expired lease", secs(90), || {
        (leases(&cluster).len() == 2).then_some(())
    });
}
