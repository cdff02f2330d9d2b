//! Credentials of agents that become invalid, while links are open and when agents reconnect.

use std::fs;
use std::time::Instant;

use adit_testkit::certificates::{ThrowawayFiles, Usage};

use crate::cluster::{AGENT, AUDIENCE, Cluster, MadeBy, Mode, Proof, flag};
use crate::jwt::{Signer, claims};
use crate::namespace::{BODY, Node};
use crate::ports;
use crate::process::Process;
use crate::server::Server;
use crate::wait::{secs, until};

/// A server at fixed ports, and an agent that reads its token from a file.
struct Admitted {
    agent: Process,
    server: Server,
    ports: [u16; 3],
    node: Node,
}

const TOKEN: &str = "agent.token";

impl Admitted {
    fn start(cluster: &Cluster, token: &str) -> Self {
        let ports = [(); 3].map(|()| ports::free());
        let server = cluster.server_at(MadeBy::Adit, ports, &[]);
        let node = Node::start(cluster, 0);
        let file = cluster.token_file(TOKEN, token);
        let args = cluster.agent_args(&node.host.to_string(), server.agents, &file);
        let agent = cluster.run_agent(&node, "agent", &args);
        server.links(1.0);
        Self {
            agent,
            server,
            ports,
            node,
        }
    }

    /// Restarts the server, which forgets all admitted agents.
    fn restart_server(&mut self, cluster: &Cluster) {
        self.server.process.kill();
        self.server = cluster.server_at(MadeBy::Adit, self.ports, &[]);
    }

    fn assert_serves(&self, cluster: &Cluster) {
        let raw = "/api/v1/namespaces/default/pods/http:pod-1:8080/proxy/";
        let answer = until("an answer", secs(30), || {
            cluster.try_kubectl(&["get", "--raw", raw], None).ok()
        });
        assert_eq!(answer, format!("{BODY}{}", self.node.address));
    }

    fn is_refused(&self, why: &str) {
        until(&format!("a refusal: {why}"), secs(30), || {
            let log = self.server.log();
            log.contains(why).then_some(())
        });
        self.server.links(0.0);
    }
}

/// As upstream's server, ours reviews a token once for each link.
#[test]
fn an_expired_token_keeps_its_link_and_admits_no_new_one() {
    // Seconds of validity. The API server accepts a token for a minute after its expiry, so 15 s are left.
    const LEFT: i64 = 15 - 60;
    let Some(cluster) = Cluster::of("an expiring token", Mode::Grpc) else {
        return;
    };
    let signer = Signer::new(&cluster.files.key("accounts"));
    let uid = cluster.account_uid();
    let short = signer.sign(&claims(&uid, 1, LEFT));
    let mut admitted = Admitted::start(&cluster, &short);
    cluster.until_void(&short);
    admitted.assert_serves(&cluster);
    admitted.server.links(1.0);
    admitted.restart_server(&cluster);
    admitted.is_refused("service account jwt not valid");
    let valid = signer.sign(&claims(&uid, 2, 600));
    cluster.token_file(TOKEN, &valid);
    admitted.server.links(1.0);
    admitted.assert_serves(&cluster);
    admitted.agent.kill();
}

#[test]
fn a_token_of_a_deleted_pod_is_refused() {
    let Some(cluster) = Cluster::of("a pod that is gone", Mode::Grpc) else {
        return;
    };
    let of_pod = |pod: &str| {
        let name = format!("--bound-object-name={pod}");
        let bound = ["--audience", AUDIENCE, "--bound-object-kind=Pod", &name];
        // A pod's token belongs to an account of the pod's namespace.
        cluster.token("kube-system", AGENT, &bound)
    };
    for pod in ["agent-1", "agent-2"] {
        cluster.create(&Cluster::agent_pod(pod));
    }
    let of_gone = of_pod("agent-1");
    let mut admitted = Admitted::start(&cluster, &of_gone);
    cluster.delete_pod("kube-system", "agent-1");
    cluster.until_void(&of_gone);
    admitted.server.links(1.0);
    admitted.restart_server(&cluster);
    admitted.is_refused("Failed to validate authentication token");
    cluster.token_file(TOKEN, &of_pod("agent-2"));
    admitted.server.links(1.0);
    admitted.assert_serves(&cluster);
}

#[test]
fn a_deny_list_ends_the_link_of_a_node() {
    let Some(cluster) = Cluster::of("a deny list", Mode::Grpc) else {
        return;
    };
    let list = cluster.token_file("deny", "");
    let server = cluster.server("proxy-server", &[&flag("agent-deny", &list)]);
    let node = Node::start(&cluster, 0);
    let node_1 = ["--bound-object-kind=Node", "--bound-object-name=node-1"];
    let bound = [&["--audience", AUDIENCE][..], &node_1].concat();
    let token = cluster.token("kube-system", AGENT, &bound);
    let file = cluster.token_file(TOKEN, &token);
    let args = cluster.agent_args(&node.host.to_string(), server.agents, &file);
    let _agent = cluster.run_agent(&node, "agent", &args);
    server.links(1.0);
    let began = Instant::now();
    fs::write(&list, "node=node-1\n").expect("a file");
    server.links(0.0);
    let took = began.elapsed().as_secs_f64();
    println!("MEASURED a deny list ends a link after {took:.1} s");
    fs::write(&list, "").expect("a file");
    server.links(1.0);
}

/// The CA of agents' certificates is rotated as installations do it: first both CAs, then only the new one.
#[test]
fn agent_ca_rotation_admits_both_cas_and_then_only_the_new_one() {
    let Some(cluster) = Cluster::of("a rotated authority", Mode::Grpc) else {
        return;
    };
    let next = ThrowawayFiles::create(&[]).expect("certificates");
    next.issue("agent", Usage::Client, &[])
        .expect("a certificate");
    let read = |file: &std::path::Path| fs::read_to_string(file).expect("a file");
    let [old, new] = [cluster.files.ca_file(), next.ca_file()].map(|file| read(&file));
    let bundle = cluster.token_file("agents.ca", &old);
    let authority = flag("cluster-ca-cert", &bundle);
    let server = cluster.server_with("proxy-server", Proof::Certificate, &[&authority]);
    let node = Node::start(&cluster, 0);
    let agent = |name: &str, files: &ThrowawayFiles| {
        let mut args = cluster.plain_agent_args(&node.host.to_string(), server.agents);
        args.push(flag("agent-cert", files.cert("agent")));
        args.push(flag("agent-key", files.key("agent")));
        cluster.run_agent(&node, name, &args)
    };
    let _old = agent("old", &cluster.files);
    server.links(1.0);
    let _new = agent("new", &next);
    let refused = || server.log().contains("handshake").then_some(());
    until("a refused handshake", secs(20), refused);
    server.links(1.0);
    fs::write(&bundle, format!("{old}{new}")).expect("a file");
    let began = Instant::now();
    server.links(2.0);
    let took = began.elapsed().as_secs_f64();
    println!("MEASURED a new authority is known after {took:.1} s");
    fs::write(&bundle, &new).expect("a file");
    // New links with the old CA are refused. The new agent keeps its link.
    drop(agent("late", &cluster.files));
    until("the new agent serves", secs(30), || {
        let raw = "/api/v1/namespaces/default/pods/http:pod-1:8080/proxy/";
        cluster.try_kubectl(&["get", "--raw", raw], None).ok()
    });
}
