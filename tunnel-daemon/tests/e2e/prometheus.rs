//! A Prometheus of the management cluster scrapes another cluster's pods, kubelets and Services through the tunnel. It finds them by
//! Kubernetes service discovery, whose requests go the same way.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;

use adit_testkit::http;
use serde_json::{Value, json};

use crate::cgroup::Cgroup;
use crate::cluster::{Cluster, EXTENSIONS, Mode, Proof, programs};
use crate::namespace::Node;
use crate::ports;
use crate::process::Process;
use crate::wait::{secs, until};

/// Pods with metrics, 10.78.0.1 and so on.
const PODS: usize = 200;
/// The first of them have metrics by TLS, too.
const PODS_BY_TLS: usize = 5;
const PODS_NETWORK: &str = "10.78.0.0/24";
/// Address of the Service. The node has it, as if a Service proxy led it there.
const SERVICE: &str = "10.96.77.77";
/// Targets of each job.
const JOBS: [(&str, usize); 4] = [
    ("kubelets", 1),
    ("pods", PODS),
    ("pods-by-tls", PODS_BY_TLS),
    ("services", 1),
];

/// Pods with metrics, and a Service.
fn prepare(cluster: &Cluster, node: &Node) {
    let pods: Vec<Value> = (1..=PODS)
        .map(|number| {
            let mut ports = vec![json!({"name": "metrics", "containerPort": 9100})];
            if number <= PODS_BY_TLS {
                ports.push(json!({"name": "metrics-by-tls", "containerPort": 9443}));
            }
            let address = format!("10.78.0.{number}");
            json!({
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": format!("metrics-{number}"), "namespace": "default"},
                "spec": {"nodeName": "node-1", "containers": [{"name": "main", "image": "none", "ports": ports}]},
                "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
            })
        })
        .collect();
    let pods = json!({"apiVersion": "v1", "kind": "List", "items": pods});
    cluster.create(&pods);
    // A kubelet would write the status.
    cluster.kubectl(&["replace", "--subresource=status", "-f", "-"], Some(&pods));
    cluster.create(&json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "metrics", "namespace": "default"},
        "spec": {"clusterIP": SERVICE, "ports": [{"name": "metrics", "port": 9100}]},
    }));
    node.command(&["ip", "route", "add", "local", PODS_NETWORK, "dev", "lo"]);
    node.command(&[
        "ip",
        "address",
        "add",
        &format!("{SERVICE}/32"),
        "dev",
        "lo",
    ]);
}

/// What Prometheus is to find and scrape, through this proxy.
fn configuration(cluster: &Cluster, proxy: Option<&str>) -> Value {
    let files = &cluster.files;
    let through = |mut part: Value| {
        if let Some(proxy) = proxy {
            part["proxy_url"] = json!(proxy);
        }
        part
    };
    let found = |role: &str| {
        through(json!({
            "role": role,
            "api_server": format!("https://{}", cluster.api_address()),
            "tls_config": {"ca_file": files.ca_file()},
            "authorization": {"credentials_file": cluster.administrators_token()},
        }))
    };
    let kept = |label: &str, value: &str| json!({"source_labels": [format!("__meta_kubernetes_{label}")], "regex": value, "action": "keep"});
    let job = |name: &str, role: &str, rules: &[Value], tls: Value| {
        let mut job = json!({"job_name": name, "kubernetes_sd_configs": [found(role)], "relabel_configs": rules});
        if !tls.is_null() {
            job["scheme"] = json!("https");
            job["tls_config"] = tls;
        }
        through(job)
    };
    let of_port = |name| [kept("pod_container_port_name", name)];
    let address = json!({
        "source_labels": ["__meta_kubernetes_service_cluster_ip"],
        "target_label": "__address__",
        "replacement": "$1:9100",
    });
    let kubelet = json!({
        "ca_file": files.ca_file(),
        "cert_file": files.cert("kubelet-client"),
        "key_file": files.key("kubelet-client"),
    });
    let named = json!({"ca_file": files.ca_file(), "server_name": EXTENSIONS});
    json!({
        "global": {"scrape_interval": "5s", "scrape_timeout": "5s"},
        "scrape_configs": [
            job("pods", "pod", &of_port("metrics"), Value::Null),
            job("pods-by-tls", "pod", &of_port("metrics-by-tls"), named),
            job("kubelets", "node", &[kept("node_name", "node-1")], kubelet),
            job("services", "service", &[kept("service_name", "metrics"), address], Value::Null),
        ],
    })
}

struct Prometheus {
    at: SocketAddr,
    _process: Process,
}

impl Prometheus {
    /// Starts one that listens at this address of the host or node. `lead` is what a shell does before it.
    fn start(
        cluster: &Cluster,
        name: &str,
        proxy: Option<&str>,
        host: Ipv4Addr,
        lead: &str,
    ) -> Self {
        let at = SocketAddr::from((host, ports::free()));
        let config = configuration(cluster, proxy).to_string();
        let config = cluster.token_file(&format!("{name}.json"), &config);
        let script = format!(
            "{lead} {} --config.file={} --storage.tsdb.path={} --web.listen-address={at}",
            cluster.program("prometheus").display(),
            config.display(),
            cluster.path(&format!("{name}.tsdb")).display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        Self {
            at,
            _process: Process::start_command(name, command, cluster.dir.path()),
        }
    }

    /// The result of a query, whose characters are those that URLs may have.
    fn query(&self, query: &str) -> Option<Vec<Value>> {
        let answer = http::get(self.at, &format!("/api/v1/query?query={query}")).ok()?;
        let answer: Value = serde_json::from_str(answer.body()).ok()?;
        answer["data"]["result"].as_array().cloned()
    }

    /// The only number of a result, which Prometheus writes as text.
    fn number(&self, query: &str) -> Option<f64> {
        self.query(query)?.first()?["value"][1]
            .as_str()?
            .parse()
            .ok()
    }

    /// Waits until each target was scraped three times, and checks that none was ever down, and that each answered for itself.
    fn check(&self, name: &str) {
        /// `count(sum_over_time(up[10m])>=3)`: targets that were up in three scrapes.
        const UP: &str = "count(sum_over_time(up%5B10m%5D)%3E=3)";
        /// `min_over_time(up[10m])==0`: targets that were ever down.
        const EVER_DOWN: &str = "min_over_time(up%5B10m%5D)==0";
        let all: usize = JOBS.iter().map(|(_job, targets)| targets).sum();
        let all = f64::from(u32::try_from(all).expect("few"));
        until(
            &format!("{name}: three scrapes of each target"),
            secs(120),
            || (self.number(UP)? == all).then_some(()),
        );
        let down = self.query(EVER_DOWN).expect("it answers");
        assert!(down.is_empty(), "{name}: targets were down: {down:?}");
        let mut jobs: BTreeMap<String, usize> = BTreeMap::new();
        for series in self.query("reached").expect("it answers") {
            let [job, instance, at] = ["job", "instance", "at"]
                .map(|label| series["metric"][label].as_str().expect("a label"));
            let host = instance.split(':').next();
            assert!(job == "kubelets" || host == Some(at), "{name}: {series}");
            *jobs.entry(job.to_owned()).or_default() += 1;
        }
        let expected = JOBS.map(|(job, targets)| (job.to_owned(), targets));
        assert_eq!(jobs, expected.into_iter().collect(), "{name}");
        let seconds = self
            .number("avg(scrape_duration_seconds)")
            .expect("it answers");
        println!(
            "MEASURED {name}: {:.2} ms for a scrape on average",
            seconds * 1e3
        );
    }
}

/// Through an HTTP proxy, a SOCKS5 proxy, and captured without any setting; then in the node's network, which shows the cost.
#[test]
fn prometheus_finds_and_scrapes_200_targets_of_another_cluster() {
    const TEST: &str = "prometheus_finds_and_scrapes_200_targets_of_another_cluster";
    let Some(programs) = programs(TEST) else {
        return;
    };
    if Command::new("prometheus")
        .arg("--version")
        .output()
        .is_err()
    {
        println!("SKIPPED {TEST}: it needs prometheus");
        return;
    }
    let cgroup = Cgroup::new();
    let cluster = Cluster::start(programs, Mode::Grpc);
    let [http, socks] = [(); 2].map(|()| ports::free());
    let mut flags = vec![
        format!("--frontend=http-proxy=tcp:127.0.0.1:{http}"),
        format!("--frontend=socks5=tcp:127.0.0.1:{socks}"),
        "--insecure-plaintext-frontend".to_owned(),
        cgroup.flag(),
    ];
    let api = format!("{}/32", cluster.cables[0][0]);
    let kubelet = format!("{}/32", Cluster::node_address(0));
    for captured in [PODS_NETWORK, &format!("{SERVICE}/32"), &kubelet, &api] {
        flags.push(format!("--redirect={captured}"));
    }
    let server = cluster.native_server_at([(); 3].map(|()| ports::free()), &flags);
    let node = Node::start(&cluster, 0);
    let _agent = cluster.agent_on(&node, &server, Proof::Token);
    server.links(1.0);
    prepare(&cluster, &node);

    let opened = || {
        server
            .value("adit_tunnels_opened_total{path=\"lane\"}")
            .unwrap_or_default()
    };
    let captured = format!("echo $$ > {}/cgroup.procs && exec", cgroup.path().display());
    for (name, proxy, lead) in [
        ("by-http", Some(format!("http://127.0.0.1:{http}")), "exec"),
        (
            "by-socks5",
            Some(format!("socks5://127.0.0.1:{socks}")),
            "exec",
        ),
        ("captured", None, &captured),
    ] {
        let before = opened();
        let here = Ipv4Addr::LOCALHOST;
        Prometheus::start(&cluster, name, proxy.as_deref(), here, lead).check(name);
        println!("MEASURED {name}: {} tunnels on lanes", opened() - before);
    }
    let [_host, there] = cluster.cables[0];
    let inside = format!("exec {}", node.enters());
    Prometheus::start(&cluster, "direct", None, there, &inside).check("direct");
}
