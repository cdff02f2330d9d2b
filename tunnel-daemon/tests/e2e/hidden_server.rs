//! A server that no agent finds: it is not ready, so that it is in no Service, and without an agent it is not ready.

use std::time::Instant;

use adit_tls::pki::{self, Authority, Wanted};
use adit_tls::selfsigned::Usage;
use tempfile::TempDir;

use crate::balance::balance;
use crate::cluster::{Cluster, MadeBy, Mode, Proof, programs};
use crate::go;
use crate::namespace::{BODY, Node};
use crate::ports;
use crate::server::ask;
use crate::wait::{secs, until};

/// Between the values of a variable.
const PEERS_SEPARATOR: &str = "\n";

/// Settings of one of the peers, as variables of a program with upstream's flags.
fn settings(files: &TempDir, name: &str) -> Vec<(&'static str, String)> {
    let wanted = Wanted {
        stem: name.to_owned(),
        authority: Authority::Peers,
        usage: Usage::Peer,
        common_name: name.to_owned(),
        names: vec!["127.0.0.1".to_owned()],
    };
    pki::issue(files.path(), 30, &[wanted]).expect("a certificate");
    let file = |name: String| files.path().join(name).display().to_string();
    vec![
        ("ADIT_PEER_CERT", file(format!("{name}.crt"))),
        ("ADIT_PEER_KEY", file(format!("{name}.key"))),
        ("ADIT_PEER_CA_CERT", file("peers-ca.crt".to_owned())),
    ]
}

/// A rollout deadlocks with upstream's server: the new one gets no agent before it is ready, and is not ready before it has one.
/// Ours asks its peer, although agents still know the old one alone. Both have upstream's flags.
#[test]
fn a_server_in_no_service_is_ready_and_serves_through_its_peer() {
    let Some(programs) = programs("hidden-server") else {
        return;
    };
    go::binary(go::Program::Server(go::Release::V0360));
    let cluster = Cluster::start(programs, Mode::Grpc);
    let files = TempDir::new().expect("a folder");
    pki::init(files.path(), 30).expect("authorities");
    let peer_port = ports::free();
    let socket = cluster.path("old.sock").display().to_string();
    let flags = [format!("--uds-name={socket}"), "--server-id=old".to_owned()];
    let mut of_old = settings(&files, "old");
    of_old.push(("ADIT_PEER_BIND", format!("127.0.0.1:{peer_port}")));
    let old = cluster.server_set([(); 3].map(|()| ports::free()), &flags, &of_old);
    let node = Node::start(&cluster, 0);
    let _agent = cluster.agent_on(&node, &old, Proof::Token);
    old.links(1.0);
    let raw = [
        "get",
        "--raw",
        "/api/v1/namespaces/default/pods/http:pod-1:8080/proxy/",
    ];
    let flags = ["--server-id=new".to_owned()];
    let free = || [(); 3].map(|()| ports::free());
    let mut upstream = cluster.server_at(MadeBy::Upstream, free(), &flags);
    let answer = cluster.try_kubectl(&raw, None);
    let without = answer.expect_err("it has no agent");
    assert!(!without.contains(BODY), "{without}");
    assert!(ask(upstream.health, "/readyz").is_err(), "not ready");
    upstream.process.kill();
    let mut of_new = settings(&files, "new");
    of_new.push(("ADIT_PEER", format!("127.0.0.1:{peer_port}")));
    let began = Instant::now();
    let new = cluster.server_set(free(), &flags, &of_new);
    let answer = until("an answer", secs(10), || {
        cluster.try_kubectl(&raw, None).ok()
    });
    println!(
        "MEASURED a new server: an answer after {:.2} s",
        began.elapsed().as_secs_f64()
    );
    assert_eq!(answer, format!("{BODY}{}", node.address));
    until("readiness", secs(5), || ask(new.health, "/readyz").ok());
    let logs = ["logs", "--tail=1", "pod-1", "-c", "main"];
    assert_eq!(cluster.kubectl(&logs, None), "line 1000");
    assert_eq!(
        new.value("adit_links{peer=\"adit\"}"),
        Some(0.0),
        "no agent has found it"
    );
    let dials = "adit_peer_dials_total{direction=\"to\",result=\"opened\",server=\"old\"}";
    assert!(new.value(dials) >= Some(2.0));
}

/// Three controllers of k0s behind one virtual address that leads to one of them alone: agents are linked to that one, and all
/// three API servers reach the node.
#[test]
fn three_api_servers_reach_a_node_whose_agent_knows_one_server() {
    let Some(programs) = programs("several-servers") else {
        return;
    };
    let cluster = Cluster::start(programs, Mode::Grpc);
    let files = TempDir::new().expect("a folder");
    pki::init(files.path(), 30).expect("authorities");
    let peer_ports = [(); 3].map(|()| ports::free());
    let sockets = ["egress.sock", "second.sock", "third.sock"].map(|name| cluster.path(name));
    let servers = [0, 1, 2].map(|number| {
        let name = format!("controller-{number}");
        let mut set = settings(&files, &name);
        set.push((
            "ADIT_PEER_BIND",
            format!("127.0.0.1:{}", peer_ports[number]),
        ));
        let others = peer_ports
            .iter()
            .filter(|port| **port != peer_ports[number]);
        let others: Vec<String> = others.map(|port| format!("127.0.0.1:{port}")).collect();
        set.push(("ADIT_PEER", others.join(PEERS_SEPARATOR)));
        let flags = [
            format!("--uds-name={}", sockets[number].display()),
            format!("--server-id={name}"),
            "--server-count=3".to_owned(),
        ];
        cluster.server_set([(); 3].map(|()| ports::free()), &flags, &set)
    });
    let address = balance(0, vec![servers[0].agents]);
    let node = Node::start(&cluster, 0);
    let mut args = cluster.plain_agent_args(&node.host.to_string(), address);
    args.extend(cluster.proof_args(&node, Proof::Token));
    let _agent = cluster.run_agent(&node, "agent", &args);
    servers[0].links(1.0);
    let api_ports = [(); 2].map(|()| ports::free());
    let _others = [0, 1].map(|at| cluster.api_server_over(api_ports[at], &sockets[at + 1]));
    let mut kubeconfigs = vec![cluster.kubeconfig("admin")];
    kubeconfigs.extend(api_ports.map(|port| cluster.administrator_at(port)));
    for kubeconfig in &kubeconfigs {
        let by = format!("--kubeconfig={}", kubeconfig.display());
        until("an API server", secs(120), || {
            cluster
                .try_kubectl(&[&by, "get", "--raw", "/readyz"], None)
                .ok()
        });
        let logs = [&by, "logs", "--tail=1", "pod-1", "-c", "main"];
        assert_eq!(cluster.kubectl(&logs, None), "line 1000", "{by}");
        let exec = [&by, "exec", "pod-1", "-c", "main", "--", "echo", "here"];
        assert_eq!(cluster.kubectl(&exec, None).trim(), "here", "{by}");
    }
    let links: Vec<_> = servers
        .iter()
        .map(|server| server.value("adit_links{peer=\"adit\"}"))
        .collect();
    assert_eq!(
        links,
        [Some(1.0), Some(0.0), Some(0.0)],
        "the address leads to one server"
    );
}
