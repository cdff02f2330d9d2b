//! Objects of the cluster: accounts, rights, nodes and pods, and the Services on the first node.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::cluster::{AGENT, AUDIENCE, Cluster, NODES};
use crate::wait::{secs, until};

/// The server's user, and the roles for it.
const SERVER: &str = "konnectivity-server";

impl Cluster {
    /// Creates accounts, rights, nodes and pods.
    pub(crate) fn prepare(&self) {
        // Binds a user to a role, under the role's name.
        let binding = |kind: &str, role: &str, user: &str| {
            let group = "rbac.authorization.k8s.io";
            json!({
                "apiVersion": format!("{group}/v1"),
                "kind": format!("{kind}Binding"),
                "metadata": {"name": role, "namespace": if kind == "Role" { "kube-system" } else { "" }},
                "roleRef": {"apiGroup": group, "kind": kind, "name": role},
                "subjects": [{"kind": "User", "name": user, "apiGroup": group}],
            })
        };
        let role = |name: &str, verbs: &[&str]| {
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "Role",
                "metadata": {"name": name, "namespace": "kube-system"},
                "rules": [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": verbs}],
            })
        };
        let account = |namespace: &str, name: &str| json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}});
        let objects = [
            account("kube-system", AGENT),
            account("kube-system", "system-konnectivity-agent"),
            account("kube-system", "other"),
            account("default", AGENT),
            // Exactly the rights that docs/guides names.
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": {"name": SERVER},
                "rules": [{"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}],
            }),
            binding("ClusterRole", SERVER, SERVER),
            role(SERVER, &["get", "create", "update", "list", "delete"]),
            binding("Role", SERVER, SERVER),
            role(AGENT, &["list", "watch"]),
            binding("Role", AGENT, "lease-reader"),
        ];
        let mut objects = objects.to_vec();
        for number in 0..NODES {
            objects.extend(node_and_pod(number + 1));
        }
        objects.extend(service("web", 80, 8080));
        objects.extend(service("extensions", 443, 8443));
        objects.push(json!({
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1.tunnel.adit.invalid"},
            "spec": {
                "group": "tunnel.adit.invalid",
                "version": "v1",
                "service": {"name": "extensions", "namespace": "default", "port": 443},
                "caBundle": self.authority(),
                "groupPriorityMinimum": 1000,
                "versionPriority": 10,
            },
        }));
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        self.create(&list);
        // Kubelets would write this status.
        for number in 0..NODES {
            let address = Self::node_address(number);
            let number = number + 1;
            let node = json!({
                "addresses": [{"type": "InternalIP", "address": address}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            });
            let pod = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]});
            for (kind, status) in [("node", node), ("pod", pod)] {
                let name = format!("{kind}-{number}");
                self.patch_status(["default", kind, &name], &status, &[]);
            }
        }
    }

    /// Defines the custom resources that the chart uses.
    pub(crate) fn define_kinds(&self) {
        let folder = self.program("crds").display().to_string();
        self.kubectl(&["apply", "--server-side", "-f", &folder], None);
        let established = ["wait", "--for=condition=Established", "crd", "--all"];
        self.kubectl(&established, None);
    }

    /// A validating webhook for namespaces with the label `asks=NAME`. It must answer within a second.
    pub(crate) fn webhook(&self, name: &str) -> Value {
        let webhook = json!({
            "name": format!("{name}.adit.invalid"),
            "clientConfig": {
                "service": {"name": "extensions", "namespace": "default", "path": "/validate"},
                "caBundle": self.authority(),
            },
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
            "namespaceSelector": {"matchLabels": {"asks": name}},
            "failurePolicy": "Fail",
            "timeoutSeconds": 1,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        });
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": [webhook],
        })
    }

    /// The CA certificate of all certificates, in base64.
    pub(crate) fn authority(&self) -> String {
        Self::base64(&std::fs::read(self.files.ca_file()).expect("a file"))
    }

    pub(crate) fn base64(bytes: &[u8]) -> String {
        BASE64.encode(bytes)
    }

    /// The uid of the agents' account, which appears in their tokens.
    pub(crate) fn account_uid(&self) -> String {
        let output = "jsonpath={.metadata.uid}";
        let words = ["get", "serviceaccount", AGENT, "-n", "kube-system"];
        self.kubectl(&[&words[..], &["-o", output]].concat(), None)
    }

    /// Waits until the API server rejects a token. It caches a review for ten seconds, and accepts an expired token for
    /// another minute of clock skew.
    pub(crate) fn until_void(&self, token: &str) {
        let review = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        });
        let output = "jsonpath={.status.authenticated}";
        until("a token that is void", secs(60), || {
            let is_valid = self.kubectl(&["create", "-f", "-", "-o", output], Some(&review));
            (is_valid != "true").then_some(())
        });
    }

    /// A pod to which tokens of agents can be bound.
    pub(crate) fn agent_pod(name: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "kube-system"},
            "spec": {"serviceAccountName": AGENT, "nodeName": "node-1", "containers": [{"name": "agent", "image": "none"}]},
        })
    }
}

/// A node, and its pod with the containers.
fn node_and_pod(number: usize) -> [Value; 2] {
    let containers: Vec<Value> = ["main", "flood"]
        .iter()
        .map(|name| json!({"name": name, "image": "none", "stdin": true, "tty": false}))
        .collect();
    [
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("node-{number}")}}),
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": format!("pod-{number}"), "namespace": "default"},
            "spec": {"nodeName": format!("node-{number}"), "containers": containers},
        }),
    ]
}

/// A Service whose only endpoint is on the first node.
fn service(name: &str, port: u16, there: u16) -> [Value; 3] {
    let address = Cluster::node_address(0);
    [
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"ports": [{"name": "main", "port": port, "targetPort": there}]},
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
            "ports": [{"name": "main", "port": there}],
        }),
        // The Service proxy of the API server uses Endpoints.
        json!({
            "apiVersion": "v1",
            "kind": "Endpoints",
            "metadata": {"name": name, "namespace": "default"},
            "subsets": [{
                "addresses": [{"ip": address, "targetRef": {"kind": "Pod", "namespace": "default", "name": "pod-1"}}],
                "ports": [{"name": "main", "port": there}],
            }],
        }),
    ]
}
