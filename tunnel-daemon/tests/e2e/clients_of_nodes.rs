//! What runs on a node and calls the API server, through the agent of the node: kube-proxy and the kubelet. The kubelet is
//! kubemark's hollow one, which has no container runtime.

use std::fs;
use std::path::PathBuf;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::cluster::{ADMIN_TOKEN, Cluster, Mode, Proof};
use crate::namespace::Node;
use crate::ports;
use crate::process::Process;
use crate::server::Server;
use crate::wait::{secs, until};

/// Port of the agent that leads to the API server.
const PORT: u16 = 6443;

/// A node whose API server is at a port of its agent.
struct World {
    cluster: Cluster,
    node: Node,
    server: Server,
    ports: [u16; 3],
    flags: [String; 1],
    _agent: Process,
}

impl World {
    fn start(test: &str) -> Option<Self> {
        let cluster = Cluster::of(test, Mode::Grpc)?;
        let node = Node::start(&cluster, 0);
        let ports = [(); 3].map(|()| ports::free());
        let flags = [format!(
            "--allowed-destination=127.0.0.1:{}",
            cluster.api_port
        )];
        let server = cluster.native_server_at(ports, &flags);
        let mut args = cluster.plain_agent_args(&node.host.to_string(), server.agents);
        args.extend(cluster.proof_args(&node, Proof::Token));
        args.push(format!("--target={PORT}:127.0.0.1:{}", cluster.api_port));
        let agent = cluster.run_agent(&node, "agent", &args);
        server.links(1.0);
        Some(Self {
            cluster,
            node,
            server,
            ports,
            flags,
            _agent: agent,
        })
    }

    /// A kubeconfig for programs of the node.
    fn kubeconfig(&self) -> PathBuf {
        let access = self
            .cluster
            .access_at(&format!("127.0.0.1:{PORT}"), ADMIN_TOKEN);
        self.cluster
            .token_file("of-node.kubeconfig", &access.to_string())
    }

    fn run(&self, name: &str, args: &[String]) -> Process {
        let program = self.cluster.program(name);
        self.node.run(name, &program, args, self.cluster.dir.path())
    }

    /// The server ends, with every tunnel, and another one takes its place.
    fn restart_server(&mut self) {
        self.server.process.signal(Signal::TERM);
        self.server.process.wait(secs(60));
        self.server = self.cluster.native_server_at(self.ports, &self.flags);
    }
}

fn service(name: &str, ip: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": ip, "ports": [{"port": 80}]},
    })
}

/// kube-proxy lists and watches through the tunnel: a Service becomes rules of the node, also one that is made after the server's
/// restart.
#[test]
fn kube_proxy_follows_services_through_the_agent_of_its_node() {
    let Some(mut world) = World::start("kube-proxy") else {
        return;
    };
    world.cluster.create(&service("before", "10.96.77.1"));
    let kubeconfig = world.kubeconfig();
    let proxy = world.run(
        "kube-proxy",
        &[
            format!("--kubeconfig={}", kubeconfig.display()),
            "--hostname-override=node-1".to_owned(),
            "--proxy-mode=nftables".to_owned(),
            // The kernel's limits are the host's.
            "--conntrack-max-per-core=0".to_owned(),
            "--conntrack-tcp-timeout-established=0s".to_owned(),
            "--conntrack-tcp-timeout-close-wait=0s".to_owned(),
            "--healthz-bind-address=127.0.0.1:10256".to_owned(),
            "--metrics-bind-address=127.0.0.1:10249".to_owned(),
        ],
    );
    let has_rules = |world: &World, ip: &str| {
        until(&format!("rules for {ip}"), secs(90), || {
            let listed = world
                .node
                .entering()
                .args(["nft", "list", "ruleset"])
                .output();
            let rules = String::from_utf8(listed.expect("nft runs").stdout).expect("text");
            rules.contains(ip).then_some(())
        });
    };
    has_rules(&world, "10.96.77.1");
    world.restart_server();
    world.cluster.create(&service("after", "10.96.77.2"));
    has_rules(&world, "10.96.77.2");
    drop(proxy);
}

/// A kubelet registers its node, and runs pods, through the tunnel, also after the server's restart.
#[test]
fn a_hollow_kubelet_registers_and_runs_pods_through_the_agent_of_its_node() {
    let Some(mut world) = World::start("hollow kubelet") else {
        return;
    };
    let kubeconfig = world.kubeconfig();
    let kubelet = world.run(
        "kubemark",
        &[
            "--morph=kubelet".to_owned(),
            "--name=hollow".to_owned(),
            format!("--kubeconfig={}", kubeconfig.display()),
            "--use-host-image-service=false".to_owned(),
            // The node has a kubelet of the tests.
            "--kubelet-port=10251".to_owned(),
        ],
    );
    let get = |world: &World, words: &[&str]| world.cluster.try_kubectl(words, None);
    let ready = r#"jsonpath={.status.conditions[?(@.type=="Ready")].status}"#;
    until("a node that is ready", secs(120), || {
        let status = get(&world, &["get", "node", "hollow", "-o", ready]);
        (status.ok()? == "True").then_some(())
    });
    let runs = |world: &World, name: &str| {
        world.cluster.create(&json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "nodeName": "hollow",
                "automountServiceAccountToken": false,
                "containers": [{"name": "main", "image": "example.invalid/none"}],
            },
        }));
        until(&format!("{name} to run"), secs(120), || {
            let words = ["get", "pod", name, "-o", "jsonpath={.status.phase}"];
            (get(world, &words).ok()? == "Running").then_some(())
        });
    };
    runs(&world, "before");
    world.restart_server();
    runs(&world, "after");
    drop(kubelet);
    let log = fs::read_to_string(world.cluster.path("kubemark.log")).expect("a log");
    assert!(!log.contains("panic"), "{log}");
}
