//! The manifests below `deploy/manifests`, and all other renderings of the chart. The API server accepts each of them, and
//! they grant exactly the rights that the programs need.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::cluster::{Cluster, Mode};

/// Folder of the manifests. The renderings of the chart are in the tests' programs folder.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/manifests");
/// A patch of the Deployment `kube-apiserver`.
const PATCH: &str = "sidecar.yaml";
/// The namespace of hosted control planes in the manifests.
const HOSTED: &str = "cluster-example";
/// Namespaces of other renderings.
const NAMESPACES: [&str; 2] = [HOSTED, "hosted"];
/// Bindings that `Cluster::prepare` creates for the server's user, and that the manifests create, too.
pub(crate) const PREPARED: [[&str; 2]; 2] = [
    ["clusterrolebinding", "konnectivity-server"],
    ["rolebinding", "konnectivity-server"],
];

/// The server's user, the server's account, and the agents' account.
const USER: &str = "konnectivity-server";
const SERVER: &str = "system:serviceaccount:kube-system:adit-server";
const AGENT: &str = "system:serviceaccount:kube-system:konnectivity-agent";

const REVIEWS: &str = "tokenreviews.authentication.k8s.io";
const LEASES: &str = "leases.coordination.k8s.io";

/// Subject, verb, resource, namespace.
type Right = (&'static str, &'static str, &'static str, &'static str);

/// A rendering, the rights that it grants, and rights that it must not grant.
struct Grants {
    manifest: &'static str,
    granted: &'static [Right],
    refused: &'static [Right],
}

/// Checked one after another, because their ClusterRoleBindings have the same name.
const GRANTS: [Grants; 5] = [
    Grants {
        manifest: "agent-deployment-token-leases.yaml",
        granted: &[
            (USER, "create", REVIEWS, ""),
            (USER, "get", LEASES, "kube-system"),
            (USER, "create", LEASES, "kube-system"),
            (USER, "update", LEASES, "kube-system"),
            (USER, "list", LEASES, "kube-system"),
            (USER, "delete", LEASES, "kube-system"),
            (AGENT, "list", LEASES, "kube-system"),
            (AGENT, "watch", LEASES, "kube-system"),
        ],
        refused: &[
            (USER, "watch", LEASES, "kube-system"),
            (USER, "patch", LEASES, "kube-system"),
            (USER, "list", LEASES, "kube-node-lease"),
            (USER, "create", LEASES, "default"),
            (USER, "get", "secrets", "kube-system"),
            (USER, "create", "serviceaccounts/token", "kube-system"),
            (AGENT, "create", REVIEWS, ""),
            (AGENT, "get", LEASES, "kube-system"),
            (AGENT, "create", LEASES, "kube-system"),
            (AGENT, "update", LEASES, "kube-system"),
            (AGENT, "delete", LEASES, "kube-system"),
            (AGENT, "list", LEASES, "kube-node-lease"),
            (AGENT, "get", "secrets", "kube-system"),
        ],
    },
    Grants {
        manifest: "server-daemonset-token.yaml",
        granted: &[(SERVER, "create", REVIEWS, "")],
        refused: &[
            (SERVER, "list", LEASES, "kube-system"),
            (SERVER, "create", LEASES, "kube-system"),
            (SERVER, "get", "secrets", "kube-system"),
            (SERVER, "create", "serviceaccounts/token", "kube-system"),
            (USER, "create", REVIEWS, ""),
            (AGENT, "create", REVIEWS, ""),
        ],
    },
    Grants {
        manifest: "all-in-one-cert-manager.yaml",
        granted: &[(SERVER, "create", REVIEWS, "")],
        refused: &[
            (SERVER, "list", LEASES, "kube-system"),
            (SERVER, "get", "secrets", "kube-system"),
            (AGENT, "create", REVIEWS, ""),
            (AGENT, "list", LEASES, "kube-system"),
        ],
    },
    Grants {
        manifest: "compat-daemonset-token-leases.yaml",
        granted: &[
            (SERVER, "create", REVIEWS, ""),
            (SERVER, "create", LEASES, "kube-system"),
            (SERVER, "delete", LEASES, "kube-system"),
            (AGENT, "list", LEASES, "kube-system"),
            (AGENT, "watch", LEASES, "kube-system"),
        ],
        refused: &[
            (SERVER, "list", LEASES, "kube-node-lease"),
            (SERVER, "get", "secrets", "kube-system"),
            (AGENT, "create", REVIEWS, ""),
            (AGENT, "create", LEASES, "kube-system"),
            (AGENT, "get", "secrets", "kube-system"),
        ],
    },
    Grants {
        manifest: "server-daemonset-tcp-cert-manager.yaml",
        granted: &[
            (SERVER, "create", REVIEWS, ""),
            (SERVER, "update", LEASES, "kube-system"),
            (SERVER, "list", LEASES, "kube-system"),
        ],
        refused: &[
            (SERVER, "watch", LEASES, "kube-system"),
            (SERVER, "get", "secrets", "kube-system"),
            (AGENT, "list", LEASES, "kube-system"),
        ],
    },
];

/// All manifests of a folder, sorted by name.
fn manifests(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder of manifests");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let is_manifest = |path: &PathBuf| path.extension().is_some_and(|it| it == "yaml");
    let mut manifests: Vec<PathBuf> = paths.filter(is_manifest).collect();
    manifests.sort();
    manifests
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Applies a manifest. Unknown fields and warnings fail.
fn apply(cluster: &Cluster, manifest: &Path, more: &[&str]) -> String {
    let own = [
        "apply",
        "--server-side",
        "--validate=strict",
        "--warnings-as-errors",
        "-f",
        text(manifest),
    ];
    cluster.kubectl(&[&own, more].concat(), None)
}

/// Patches the Deployment `kube-apiserver` as a dry run. `kubectl patch` has no `--validate`, so an unknown field is a
/// warning.
fn patch(cluster: &Cluster, patch: &str) -> Result<String, String> {
    let args = [
        "patch",
        "deployment",
        "kube-apiserver",
        "-n",
        HOSTED,
        "--dry-run=server",
        "--warnings-as-errors",
        patch,
    ];
    cluster.try_kubectl(&args, None)
}

/// Asks the API server with impersonation whether the subject has the right.
fn is_allowed(cluster: &Cluster, (subject, verb, resource, namespace): Right) -> bool {
    let mut kubectl = cluster.kubectl_command(&["auth", "can-i", verb]);
    match resource.split_once('/') {
        Some((resource, part)) => kubectl.arg(resource).arg(format!("--subresource={part}")),
        None => kubectl.arg(resource),
    };
    kubectl.arg(format!("--as={subject}"));
    if !namespace.is_empty() {
        kubectl.args(["-n", namespace]);
    }
    let output = kubectl.output().expect("kubectl starts");
    let answer = String::from_utf8_lossy(&output.stdout);
    match answer.split_whitespace().next() {
        Some("yes") => true,
        Some("no") => false,
        _other => panic!("{kubectl:?}: {}", String::from_utf8_lossy(&output.stderr)),
    }
}

#[test]
fn an_api_server_accepts_the_manifests_and_their_grants_suffice() {
    let Some(cluster) = Cluster::of("manifests", Mode::Grpc) else {
        return;
    };
    let renderings = cluster.renderings();
    for namespace in NAMESPACES {
        cluster.kubectl(&["create", "namespace", namespace], None);
    }
    for [kind, name] in PREPARED {
        cluster.kubectl(&["delete", kind, name, "-n", "kube-system"], None);
    }
    cluster.define_kinds();

    let manifests = [manifests(Path::new(FOLDER)), manifests(&renderings)].concat();
    let (patches, objects): (Vec<_>, Vec<_>) =
        manifests.iter().partition(|path| path.ends_with(PATCH));
    assert!(!objects.is_empty(), "no manifests in {FOLDER}");
    for manifest in objects {
        println!("{}", apply(&cluster, manifest, &["--dry-run=server"]));
        let yaml = std::fs::read_to_string(manifest).expect("a manifest");
        let is_tested = GRANTS.iter().any(|it| manifest.ends_with(it.manifest));
        assert_eq!(yaml.contains("RoleBinding\n"), is_tested, "{manifest:?}");
    }

    let labels = json!({"app": "kube-apiserver"});
    let container = json!({"name": "kube-apiserver", "image": "registry.k8s.io/pause:3.10"});
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "kube-apiserver", "namespace": HOSTED},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    });
    cluster.create(&deployment);
    assert_eq!(patches.len(), 2, "{PATCH}");
    for path in patches {
        let patched = patch(&cluster, &format!("--patch-file={}", text(path)));
        println!("{}", patched.expect("an accepted patch"));
    }
    let unknown = json!({"spec": {"template": {"spec": {"unknownField": 1}}}});
    let refused = patch(&cluster, &format!("--patch={unknown}")).expect_err("an unknown field");
    assert!(refused.contains("unknownField"), "{refused}");

    for grants in GRANTS {
        for &right in grants.granted {
            assert!(!is_allowed(&cluster, right), "{right:?} before");
        }
        let manifest = renderings.join(grants.manifest);
        apply(&cluster, &manifest, &[]);
        for &right in grants.granted {
            assert!(is_allowed(&cluster, right), "{right:?} is not granted");
        }
        for &right in grants.refused {
            assert!(!is_allowed(&cluster, right), "{right:?} is granted");
        }
        cluster.kubectl(&["delete", "-f", text(&manifest)], None);
    }
}
