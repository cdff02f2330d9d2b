//! `cargo xtask e2e`: our server as the egress of a real API server, and the Helm chart in it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;

use crate::steps::{MINUTES_5, Outcome, go, go_toolchain, run_command, stdout_of};
use crate::workspace::{Workspace, fresh};
use crate::{chart, test};

/// Where the Go module with the programs is.
const MODULE: &str = "tunnel-daemon/tests/e2e/go";
/// What is built of it.
const PACKAGES: [&str; 5] = [
    "./cmd/etcd",
    "./cmd/execs",
    "./cmd/node",
    "k8s.io/kubernetes/cmd/kube-apiserver",
    "k8s.io/kubernetes/cmd/kubectl",
];
/// Where the Go module is that names the modules with definitions of others' kinds.
const DEFINITIONS_MODULE: &str = "tunnel-daemon/tests/e2e/crds";
/// The modules, and in them the definitions of what the chart makes objects of.
const DEFINITIONS: [(&str, &str); 5] = [
    (
        "github.com/cert-manager/cert-manager",
        "deploy/crds/cert-manager.io_certificates.yaml",
    ),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
    ),
    (
        "sigs.k8s.io/gateway-api",
        "config/crd/experimental/gateway.networking.k8s.io_tlsroutes.yaml",
    ),
];
/// Longest time for that, from nothing.
const BUILD: Duration = Duration::from_secs(30 * 60);

/// Builds the control plane, renders the chart, and runs the tests with them.
///
/// # Errors
/// When something does not build or cannot be fetched, or a test fails.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<Outcome> {
    if let Err(why) = go_toolchain() {
        return Ok(Outcome::Skipped(why));
    }
    let programs = workspace.target().join("e2e");
    build(workspace, &programs)?;
    chart::render(workspace, &programs)?;
    fetch_definitions(workspace, &programs.join("crds"))?;
    test::end_to_end(workspace, &programs)?;
    Ok(Outcome::Done)
}

/// Go knows itself what is to be built anew.
fn build(workspace: &Workspace, programs: &PathBuf) -> anyhow::Result<()> {
    std::fs::create_dir_all(programs)?;
    println!("e2e: building etcd, kube-apiserver, kubectl and a node");
    let folder = workspace.path(MODULE);
    let mut list = go()?;
    list.current_dir(&folder)
        .args(["list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes"]);
    let version = stdout_of(&mut list, MINUTES_5)?;
    let mut go = go()?;
    go.current_dir(&folder)
        .args(["build", "-trimpath"])
        // As in Kubernetes' own builds: Helm asks the API server for its version.
        .arg(format!(
            "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={}",
            version.trim()
        ))
        .arg("-o")
        .arg(programs)
        .args(PACKAGES);
    run_command(&mut go, BUILD)
}

/// A module, as `go mod download` describes it.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Module {
    path: String,
    dir: PathBuf,
}

/// Writes the definitions of others' kinds into a fresh folder. Go keeps their modules, and knows their sums.
fn fetch_definitions(workspace: &Workspace, folder: &Path) -> anyhow::Result<()> {
    println!("e2e: fetching definitions of cert-manager, Prometheus Operator and Gateway API");
    let mut go = go()?;
    go.current_dir(workspace.path(DEFINITIONS_MODULE))
        .args(["mod", "download", "-json"]);
    let modules = stdout_of(&mut go, BUILD)?;
    let modules = serde_json::Deserializer::from_str(&modules).into_iter::<Module>();
    let modules: Vec<Module> = modules.collect::<Result<_, _>>()?;
    fresh(folder)?;
    for (path, file) in DEFINITIONS {
        let module = modules.iter().find(|module| module.path == path);
        let module = module.with_context(|| format!("{DEFINITIONS_MODULE}/go.mod lacks {path}"))?;
        let from = module.dir.join(file);
        let name = from.file_name().context("a file has a name")?;
        std::fs::copy(&from, folder.join(name))
            .with_context(|| format!("copy {file} of {path}"))?;
    }
    Ok(())
}
