//! Follows the Helm install page from top to end with a real API server. The chart's pods run as described in `pods`.

use std::os::unix::fs::symlink;

use serde_json::Value;

use super::{REPEATED, Reader, path_with, sections};
use crate::charts::{REPOSITORY, run_pods};
use crate::cluster::Cluster;
use crate::namespace::Node;
use crate::pods::get;
use crate::wait::secs;

const PAGE: &str = include_str!("../../../../docs/install/kubernetes.md");
/// The section whose commands install the chart.
const INSTALL: &str = "One cluster, whose control plane nodes you run";
/// The section that inspects the running programs.
const LOOK: &str = "Look";

/// Runs the commands of the page.
pub(crate) fn follow(cluster: &Cluster, node: &Node) {
    cluster.adit_as("adit");
    let path = format!("{}:{}", cluster.dir.path().display(), path_with(cluster));
    symlink(format!("{REPOSITORY}/deploy"), cluster.path("deploy")).expect("a link");
    let reader = Reader {
        cluster,
        page: "install/kubernetes",
        variables: vec![
            ("PATH", path.into()),
            ("KUBECONFIG", cluster.kubeconfig("admin").into()),
        ],
    };
    let mut running = None;
    for section in sections(PAGE) {
        let (title, blocks) = (&*section.title, &section.blocks);
        match title {
            INSTALL => {
                for block in blocks {
                    reader.run_block(title, block, secs(0));
                }
                check(cluster);
                running = Some(run_pods(cluster, node));
            }
            LOOK => {
                assert!(running.is_some(), "the page looks before it installs");
                let [block] = &blocks[..] else {
                    panic!("{title} has {} blocks", blocks.len());
                };
                let said = reader.run_block(title, block, REPEATED);
                // Output of each command: a pod of the agents, its status, and its log.
                for part in ["adit-agent-0", "ready        yes", "line 1000"] {
                    assert!(said.contains(part), "{part} is not in what it says: {said}");
                }
            }
            other => assert!(blocks.is_empty(), "no test runs the commands of {other:?}"),
        }
    }
    assert!(running.is_some(), "the page has no section {INSTALL:?}");
}

/// Checks that the objects have the values of the page.
fn check(cluster: &Cluster) {
    let field = |what: &str, pointer: &str| -> Value {
        let object = get(cluster, &[what, "-n", "kube-system"]);
        let value = object.pointer(pointer).cloned();
        value.unwrap_or_else(|| panic!("{object} has nothing at {pointer}"))
    };
    for (what, volume, secret) in [
        ("daemonset/adit-server", "agents-tls", "konnectivity-server"),
        ("daemonset/adit-agent", "tls", "konnectivity-agent"),
    ] {
        let image = field(what, "/spec/template/spec/containers/0/image");
        let image = image.as_str().expect("text");
        assert!(image.starts_with("REGISTRY/adit:"), "{image}");
        let volumes = field(what, "/spec/template/spec/volumes");
        let mut volumes = volumes.as_array().expect("a list").iter();
        let found = volumes.find(|it| it["name"] == volume);
        assert_eq!(found.expect("a volume")["secret"]["secretName"], secret);
        let data = field(&format!("secret/{secret}"), "/data");
        let keys: Vec<&String> = data.as_object().expect("data").keys().collect();
        assert_eq!(keys, ["ca.crt", "tls.crt", "tls.key"], "{secret}");
    }
}
