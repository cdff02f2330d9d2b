//! Follows KKP's migration from OpenVPN to Konnectivity and back, with two API servers: the seed's and the user cluster's.
//!
//! A route to the node stands for the VPN. Konnectivity removes the route, so only a tunnel reaches the node.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::sleep;
use std::time::Instant;

use serde_json::{Value, json};

use super::operator::{Custom, POLL_INTERVAL, Workload, Writer};
use super::{Reader, STARTED, beside, sections, text};
use crate::cluster::{Cluster, MadeBy};
use crate::platforms::Installation;
use crate::ports;
use crate::process::Process;
use crate::wait::{poll, secs, until};

pub(super) const PAGE: &str = "kkp-openvpn";
/// The id of the user cluster.
const ID: &str = "old";
const CONTAINERS_OF_VPN: &[&str] = &["apiserver", "openvpn-client", "dnat-controller"];
const CONTAINERS_OF_TUNNEL: &[&str] = &["apiserver", "konnectivity-server"];

const CLUSTER: Custom = Custom {
    kind: "Cluster",
    group: "kubermatic.k8c.io",
    version: "v1",
    plural: "clusters",
    namespace: None,
    name: ID,
    spec: r#"{"exposeStrategy": "NodePort", "clusterNetwork": {"konnectivityEnabled": false}}"#,
};
const API_SERVER: Workload = Workload {
    containers: CONTAINERS_OF_VPN,
    ..workload("cluster-old", &["apiserver"], &[("app", "apiserver")])
};
const VPN_SERVER: Workload = workload(
    "cluster-old",
    &["openvpn-server"],
    &[("app", "openvpn-server")],
);
const VPN_CLIENT: Workload = workload(
    "kube-system",
    &["openvpn-client"],
    &[("app", "openvpn-client")],
);
const AGENT: Workload = workload(
    "kube-system",
    &["konnectivity-agent"],
    &[("app", "konnectivity-agent")],
);

/// A Deployment with a single container of the same name.
const fn workload(
    namespace: &'static str,
    containers: &'static [&'static str; 1],
    labels: &'static [(&'static str, &'static str)],
) -> Workload {
    Workload {
        kind: "Deployment",
        namespace,
        name: containers[0],
        labels,
        containers,
        writer: Writer::Administrator,
    }
}

/// How the user cluster's API server reaches nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NodePath {
    Vpn,
    Tunnel,
}

struct Follower<'a> {
    installation: &'a Installation<'a>,
    /// Port of the user cluster's API server.
    port: u16,
    kubeconfig: PathBuf,
    path: Mutex<Option<NodePath>>,
    over: AtomicBool,
}

/// Follows the page from top to end.
pub(crate) fn follow(installation: &Installation<'_>) {
    let cluster = installation.cluster;
    CLUSTER.create(cluster);
    API_SERVER.create(cluster, "", "");
    for workload in [VPN_SERVER, VPN_CLIENT] {
        create(installation, &workload);
    }
    let port = ports::free();
    let follower = Follower {
        installation,
        port,
        kubeconfig: cluster.administrator_at(port),
        path: Mutex::default(),
        over: AtomicBool::new(false),
    };
    beside(&follower.over, || follower.operate(), || follower.follow());
    // The platform's other page creates its own objects.
    API_SERVER.delete(cluster);
    for workload in [VPN_SERVER, VPN_CLIENT] {
        delete(cluster, &workload);
    }
}

fn create(installation: &Installation<'_>, workload: &Workload) {
    let cluster = installation.cluster;
    workload.create(cluster, "", "");
    workload.create_pod(cluster, "", "", installation.node.address);
    workload.report(cluster, generation(cluster, workload));
}

fn delete(cluster: &Cluster, workload: &Workload) {
    workload.delete(cluster);
    workload.delete_pod(cluster);
}

fn generation(cluster: &Cluster, workload: &Workload) -> u64 {
    let output = "jsonpath={.metadata.generation}";
    let (kind, name, namespace) = (workload.kind, workload.name, workload.namespace);
    let generation = cluster.kubectl(&["get", kind, name, "-n", namespace, "-o", output], None);
    generation.parse().expect("a number")
}

impl Follower<'_> {
    fn path(&self) -> Option<NodePath> {
        *self.path.lock().expect("no holder panics")
    }

    /// Acts as KKP's operator while the page is followed.
    fn operate(&self) {
        let cluster = self.installation.cluster;
        let output = "jsonpath={.spec.clusterNetwork.konnectivityEnabled}";
        let get = ["get", "clusters.kubermatic.k8c.io", ID, "-o", output];
        let mut running = Vec::new();
        while !self.over.load(Relaxed) {
            let wanted = match cluster.kubectl(&get, None).as_str() {
                "true" => NodePath::Tunnel,
                _ => NodePath::Vpn,
            };
            if self.path() != Some(wanted) {
                running.clear();
                running = self.change(wanted);
                *self.path.lock().expect("no holder panics") = Some(wanted);
            }
            sleep(POLL_INTERVAL);
        }
        running.clear();
        self.route(false);
    }

    /// Switches to this path, and returns the processes that then run.
    fn change(&self, path: NodePath) -> Vec<Process> {
        let (cluster, by_tunnel) = (self.installation.cluster, path == NodePath::Tunnel);
        let is_first = self.path().is_none();
        if !is_first {
            self.set_containers(if by_tunnel {
                CONTAINERS_OF_TUNNEL
            } else {
                CONTAINERS_OF_VPN
            });
        }
        self.route(!by_tunnel);
        let mut running = vec![cluster.another_api_server(self.port, by_tunnel)];
        if by_tunnel {
            running.push(self.installation.server(MadeBy::Upstream));
            running.push(self.installation.agent(MadeBy::Upstream));
        }
        until("the user cluster's API server", secs(60), || {
            self.kubectl(&["get", "--raw", "/readyz"]).ok()
        });
        API_SERVER.report(cluster, generation(cluster, &API_SERVER));
        match path {
            _ if is_first => (),
            NodePath::Tunnel => {
                create(self.installation, &AGENT);
                delete(cluster, &VPN_SERVER);
                delete(cluster, &VPN_CLIENT);
            }
            NodePath::Vpn => {
                create(self.installation, &VPN_SERVER);
                create(self.installation, &VPN_CLIENT);
                delete(cluster, &AGENT);
            }
        }
        running
    }

    fn set_containers(&self, containers: &[&str]) {
        let containers: Vec<Value> = containers
            .iter()
            .map(|name| json!({"name": name, "image": "none"}))
            .collect();
        let patch = json!([{
            "op": "replace",
            "path": "/spec/template/spec/containers",
            "value": containers,
        }]);
        let patch = format!("--patch={patch}");
        let (kind, name, namespace) = (API_SERVER.kind, API_SERVER.name, API_SERVER.namespace);
        let words = ["patch", kind, name, "-n", namespace, "--type=json", &patch];
        self.installation.cluster.kubectl(&words, None);
    }

    /// Adds or removes the VPN's route.
    fn route(&self, is_there: bool) {
        let (cluster, node) = (self.installation.cluster, self.installation.node);
        let [_here, there] = cluster.cables[0].map(|end| end.to_string());
        let address = node.address.to_string();
        let change = if is_there { "replace" } else { "delete" };
        let status = std::process::Command::new("ip")
            .args(["route", change, &address, "via", &there])
            .status();
        // The route may be missing if the page failed with Konnectivity.
        assert!(
            !is_there || status.is_ok_and(|status| status.success()),
            "a route"
        );
    }

    fn kubectl(&self, words: &[&str]) -> Result<String, String> {
        let file = format!("--kubeconfig={}", self.kubeconfig.display());
        let words = [&[&*file], words].concat();
        self.installation.cluster.try_kubectl(&words, None)
    }

    fn follow(&self) {
        let cluster = self.installation.cluster;
        let reader = Reader {
            cluster,
            page: PAGE,
            variables: vec![
                ("SEED", cluster.kubeconfig("admin").into()),
                ("USER_CLUSTER", self.kubeconfig.clone().into()),
                ("ID", ID.into()),
            ],
        };
        let mut path = NodePath::Vpn;
        self.assert_path(path, "before");
        for section in sections(&text(PAGE)) {
            match section.title.as_str() {
                "Phase 2: switch" => path = NodePath::Tunnel,
                "Back" => path = NodePath::Vpn,
                "Phase 1: look" | "Phase 3: let it rest" | "Phase 4: Adit" => (),
                other => panic!("{PAGE} has no section {other}"),
            }
            let began = Instant::now();
            reader.run_section(&section);
            let took = began.elapsed().as_secs_f64();
            println!(
                "MEASURED {PAGE}, {}: commands took {took:.1} s",
                section.title
            );
            self.assert_path(path, &section.title);
        }
    }

    /// Checks that this is the path, and that `kubectl logs` works on it.
    fn assert_path(&self, path: NodePath, when: &str) {
        let when = format!("{PAGE}, {when}");
        poll(STARTED, || (self.path() == Some(path)).then_some(()));
        assert_eq!(self.path(), Some(path), "{when}");
        let logs = ["logs", "--tail=1", "pod-1", "-c", "main"];
        let log = poll(secs(60), || self.kubectl(&logs).ok());
        assert_eq!(log.as_deref(), Some("line 1000"), "{when}");
    }
}
