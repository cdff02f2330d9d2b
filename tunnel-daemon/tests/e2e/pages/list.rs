//! The pages, and their platforms' workloads: kinds, names and labels as in the platforms' sources (autumn 2026).

use serde_json::Value;

use super::Page;
use super::operator::{Custom, End, Place, Workload, Writer, upstream};

/// The cluster, control plane or configuration that pages call `$NAME` or `$ID`.
const NAME: &str = "demo";
const AGENT: &str = "konnectivity-agent";
const SERVER: &str = "konnectivity-server";
const COMPONENT_OF_OCM: &str = "proxy.open-cluster-management.io/component-name";
/// Label of agents, except on platforms with their own labels.
const APP: Labels = &[("k8s-app", AGENT)];
type Labels = &'static [(&'static str, &'static str)];

/// A server end in a static pod.
const STATIC_POD: End = End {
    container: "konnectivity-server-container",
    place: Place::Manifest("/etc/kubernetes/manifests/konnectivity-server.yaml"),
};

pub(super) const PAGES: &[Page] = &[
    Page {
        name: "kubernetes-docs",
        platforms: &["Kubernetes documentation"],
        variables: &[("KUBECONFIG", "")],
        custom: None,
        server: Some(STATIC_POD),
        agent: agent("DaemonSet", APP, Writer::Administrator),
    },
    Page {
        name: "kube-up",
        platforms: &["GCE kube-up, gRPC", "GCE kube-up, HTTP CONNECT"],
        variables: &[("KUBECONFIG", "")],
        custom: None,
        server: Some(STATIC_POD),
        agent: agent(
            "DaemonSet",
            APP,
            Writer::Addon("/etc/kubernetes/addons/konnectivity-agent/konnectivity-agent-ds.yaml"),
        ),
    },
    Page {
        name: "kind-multinode",
        platforms: &["upstream's kind-multinode"],
        variables: &[("KUBECONFIG", "")],
        custom: None,
        server: Some(End {
            container: "konnectivity-server-container",
            place: Place::Workload(Workload {
                kind: "DaemonSet",
                namespace: "kube-system",
                name: SERVER,
                labels: &[("k8s-app", SERVER)],
                containers: &["konnectivity-server-container"],
                writer: Writer::Administrator,
            }),
        }),
        agent: agent_in(
            "konnectivity-agent-container",
            "DaemonSet",
            APP,
            &["konnectivity-agent-container"],
            Writer::Administrator,
        ),
    },
    Page {
        name: "kkp",
        platforms: &["KKP"],
        variables: &[("SEED", ""), ("USER_CLUSTER", ""), ("ID", NAME)],
        custom: Some(Custom {
            kind: "Cluster",
            group: "kubermatic.k8c.io",
            version: "v1",
            plural: "clusters",
            namespace: None,
            name: NAME,
            spec: "{}",
        }),
        server: hosted(
            ["cluster-demo", "apiserver"],
            &[("app", "apiserver")],
            &["apiserver", SERVER],
            |cluster| unless_paused(cluster, 0),
        ),
        agent: agent(
            "Deployment",
            &[("app", AGENT)],
            Writer::Operator(|cluster| unless_paused(cluster, 1)),
        ),
    },
    Page {
        name: "kamaji",
        platforms: &["Kamaji"],
        variables: &[
            ("MANAGEMENT", ""),
            ("TENANT", ""),
            ("NAMESPACE", "tenants"),
            ("NAME", NAME),
        ],
        custom: Some(Custom {
            kind: "TenantControlPlane",
            group: "kamaji.clastix.io",
            version: "v1alpha1",
            plural: "tenantcontrolplanes",
            namespace: Some("tenants"),
            name: NAME,
            spec: r#"{"addons": {"konnectivity": {"server": {"port": 8132}}}}"#,
        }),
        server: hosted(
            ["tenants", NAME],
            &[("kamaji.clastix.io/name", NAME)],
            &["kube-apiserver", "kube-scheduler", SERVER],
            |plane| image_and_version(plane, "/spec/addons/konnectivity/server", 0),
        ),
        agent: agent(
            "DaemonSet",
            APP,
            Writer::Operator(|plane| {
                image_and_version(plane, "/spec/addons/konnectivity/agent", 1)
            }),
        ),
    },
    Page {
        name: "k0s",
        platforms: &["k0s"],
        variables: &[("KUBECONFIG", "")],
        custom: Some(Custom {
            kind: "ClusterConfig",
            group: "k0s.k0sproject.io",
            version: "v1beta1",
            plural: "clusterconfigs",
            namespace: Some("kube-system"),
            name: "k0s",
            spec: "{}",
        }),
        server: None,
        agent: agent(
            "DaemonSet",
            APP,
            Writer::Operator(|config| image_and_version(config, "/spec/images/konnectivity", 1)),
        ),
    },
    Page {
        name: "hypershift",
        platforms: &["HyperShift"],
        variables: &[
            ("MANAGEMENT", ""),
            ("HOSTED", ""),
            ("NAMESPACE", "clusters"),
            ("NAME", NAME),
        ],
        custom: Some(Custom {
            kind: "HostedCluster",
            group: "hypershift.openshift.io",
            version: "v1beta1",
            plural: "hostedclusters",
            namespace: Some("clusters"),
            name: NAME,
            spec: "{}",
        }),
        server: hosted(
            ["clusters-demo", "kube-apiserver"],
            &[("app", "kube-apiserver")],
            &["kube-apiserver", SERVER],
            |hosted| Some(of_release(hosted, 0)),
        ),
        agent: agent(
            "DaemonSet",
            &[("app", AGENT)],
            Writer::Operator(|hosted| {
                let own = "/metadata/annotations/hypershift.openshift.io~1konnectivity-agent-image";
                Some(field(hosted, own).unwrap_or_else(|| of_release(hosted, 1)))
            }),
        ),
    },
    Page {
        name: "capi",
        platforms: &["CAPI"],
        variables: &[
            ("MANAGEMENT", ""),
            ("WORKLOAD", ""),
            ("NAMESPACE", "planes"),
            ("NAME", NAME),
        ],
        custom: Some(Custom {
            kind: "HostedControlPlane",
            group: "controlplane.cluster.x-k8s.io",
            version: "v1alpha1",
            plural: "hostedcontrolplanes",
            namespace: Some("planes"),
            name: NAME,
            spec: r#"{"deployment": {"apiServer": {"konnectivity": {"args": {}}}}}"#,
        }),
        server: hosted(
            ["planes", "demo-api-server"],
            &[
                ("cluster.x-k8s.io/cluster-name", NAME),
                ("app.kubernetes.io/component", "api-server"),
            ],
            &["kube-apiserver", SERVER],
            |plane| in_parts(plane, "/spec/deployment/apiServer/konnectivity/image", 0),
        ),
        agent: agent(
            "Deployment",
            &[("app.kubernetes.io/component", "konnectivity")],
            Writer::Operator(|plane| in_parts(plane, "/spec/konnectivityClient/image", 1)),
        ),
    },
    Page {
        name: "ocm",
        platforms: &["OCM"],
        variables: &[("HUB", ""), ("MANAGED", "")],
        custom: Some(Custom {
            kind: "ManagedProxyConfiguration",
            group: "proxy.open-cluster-management.io",
            version: "v1alpha1",
            plural: "managedproxyconfigurations",
            namespace: None,
            name: "cluster-proxy",
            spec: r#"{
                "proxyServer": {
                    "image": "registry.k8s.io/kas-network-proxy/proxy-server:v0.36.0",
                    "namespace": "open-cluster-management-addon"
                },
                "proxyAgent": {"image": "registry.k8s.io/kas-network-proxy/proxy-agent:v0.36.0"}
            }"#,
        }),
        server: Some(End {
            container: "proxy-server",
            place: Place::Workload(Workload {
                kind: "Deployment",
                namespace: "open-cluster-management-addon",
                name: "cluster-proxy",
                labels: &[(COMPONENT_OF_OCM, "proxy-server")],
                containers: &["proxy-server"],
                writer: Writer::Operator(|own| field(own, "/spec/proxyServer/image")),
            }),
        }),
        agent: End {
            container: "proxy-agent",
            place: Place::Workload(Workload {
                kind: "Deployment",
                namespace: "open-cluster-management-cluster-proxy",
                name: "cluster-proxy-proxy-agent",
                labels: &[(COMPONENT_OF_OCM, "proxy-agent")],
                containers: &["proxy-agent", "addon-agent", "service-proxy"],
                writer: Writer::Operator(|own| field(own, "/spec/proxyAgent/image")),
            }),
        },
    },
];

/// A server end in a pod of a hosted API server.
const fn hosted(
    [namespace, name]: [&'static str; 2],
    labels: Labels,
    containers: &'static [&'static str],
    operator: fn(&Value) -> Option<String>,
) -> Option<End> {
    Some(End {
        container: SERVER,
        place: Place::Workload(Workload {
            kind: "Deployment",
            namespace,
            name,
            labels,
            containers,
            writer: Writer::Operator(operator),
        }),
    })
}

/// An agent end under the name that most platforms use.
const fn agent(kind: &'static str, labels: Labels, writer: Writer) -> End {
    agent_in(AGENT, kind, labels, &[AGENT], writer)
}

/// An agent end whose only container has another name.
const fn agent_in(
    container: &'static str,
    kind: &'static str,
    labels: Labels,
    containers: &'static [&'static str],
    writer: Writer,
) -> End {
    End {
        container,
        place: Place::Workload(Workload {
            kind,
            namespace: "kube-system",
            name: AGENT,
            labels,
            containers,
            writer,
        }),
    }
}

fn field(object: &Value, pointer: &str) -> Option<String> {
    object.pointer(pointer)?.as_str().map(str::to_owned)
}

/// KKP's image is fixed in its code. `None` while the cluster is paused.
fn unless_paused(cluster: &Value, end: usize) -> Option<String> {
    let is_paused = cluster.pointer("/spec/pause") == Some(&Value::Bool(true));
    (!is_paused).then(|| upstream(end))
}

/// The image from the fields `image` and `version` at `pointer`. Missing fields take the release's values.
fn image_and_version(object: &Value, pointer: &str, end: usize) -> Option<String> {
    let own = upstream(end);
    let (image, version) = own.rsplit_once(':')?;
    let field = |name: &str, default: &str| {
        field(object, &format!("{pointer}/{name}")).unwrap_or_else(|| default.to_owned())
    };
    let [image, version] =
        [("image", image), ("version", version)].map(|(name, own)| field(name, own));
    Some(format!("{image}:{version}"))
}

/// The image from the fields `registry`, `repository` and `tag` at `pointer`. Missing fields take the release's values.
fn in_parts(object: &Value, pointer: &str, end: usize) -> Option<String> {
    let own = upstream(end);
    let (image, tag) = own.rsplit_once(':')?;
    let (registry, repository) = image.split_once('/')?;
    let field = |name: &str, default: &str| {
        field(object, &format!("{pointer}/{name}")).unwrap_or_else(|| default.to_owned())
    };
    let [registry, repository, tag] = [
        ("registry", registry),
        ("repository", repository),
        ("tag", tag),
    ]
    .map(|(name, default)| field(name, default));
    Some(format!("{registry}/{repository}:{tag}"))
}

/// HyperShift's image of server and agents: the override, or the release's image.
fn of_release(hosted: &Value, end: usize) -> String {
    let pointer = "/metadata/annotations/hypershift.openshift.io~1image-overrides";
    let overrides = field(hosted, pointer).unwrap_or_default();
    let image = overrides
        .split(',')
        .find_map(|pair| pair.strip_prefix("apiserver-network-proxy="));
    image.map_or_else(|| upstream(end), str::to_owned)
}
