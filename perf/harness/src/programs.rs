//! The programs of a run: found, or built once and kept below `target/perf`.

use std::cell::OnceCell;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::steps::{go, output_of, run_command};
use crate::workspace::Workspace;

/// Time limit of a build.
const BUILD_LIMIT: Duration = Duration::from_secs(25 * 60);
/// The measured version of rathole.
pub(super) const RATHOLE: &str = "0.5.0";

/// Finds and builds programs, each only when a run needs it.
pub(crate) struct Programs {
    pub(crate) workspace: Workspace,
    /// Output folder of this harness.
    pub(crate) out: PathBuf,
    /// The `adit` binary given on the command line.
    adit: Option<PathBuf>,
    /// Path of `adit-load`.
    pub(crate) load: PathBuf,
    /// The Go load tool, if it was built.
    pub(crate) go_load: OnceCell<PathBuf>,
}

impl Programs {
    /// Builds the load tool, which every run needs.
    ///
    /// # Errors
    /// The load tool cannot be built.
    pub(crate) fn new(workspace: &Workspace, adit: Option<PathBuf>) -> anyhow::Result<Self> {
        let out = workspace.path("target/perf");
        fs::create_dir_all(out.join("bin"))?;
        let mut programs = Self {
            workspace: workspace.clone(),
            out,
            adit,
            load: PathBuf::new(),
            go_load: OnceCell::new(),
        };
        programs.load = programs.kept("adit-load")?;
        Ok(programs)
    }

    /// Builds the Go load tool.
    ///
    /// # Errors
    /// It cannot be built.
    pub(crate) fn build_go_load(&self) -> anyhow::Result<()> {
        let program = self.go_build("perf/go-load", ".", "go-load")?;
        // Another build gives the same path.
        self.go_load.set(program).ok();
        Ok(())
    }

    /// The proxy of HyperShift's design.
    ///
    /// # Errors
    /// The program cannot be built.
    pub(crate) fn go_proxy(&self) -> anyhow::Result<PathBuf> {
        self.go_build("perf/go-proxy", ".", "go-proxy")
    }

    /// The `adit` binary: the given one, or this tree's release build.
    ///
    /// # Errors
    /// The binary cannot be built, or the given path is not a file.
    pub(crate) fn adit(&self) -> anyhow::Result<PathBuf> {
        if let Some(given) = &self.adit {
            ensure!(given.is_file(), "{} is no program", given.display());
            return Ok(given.clone());
        }
        self.kept("adit")
    }

    /// The report's description of that binary.
    pub(crate) fn adit_version(&self) -> &'static str {
        match self.adit {
            Some(_) => "the binary given with --adit",
            None => "this tree, release build",
        }
    }

    /// Upstream's `server` or `agent`, of the version the interop tests pin.
    ///
    /// # Errors
    /// The program cannot be built.
    pub(crate) fn upstream(&self, role: &str) -> anyhow::Result<PathBuf> {
        let package = format!("sigs.k8s.io/apiserver-network-proxy/cmd/{role}");
        let name = format!("upstream-{role}");
        self.go_build("tunnel-daemon/tests/interop/go", &package, &name)
    }

    /// rathole, from its package. The versions in its lock file do not build with current Rust, so newer compatible
    /// dependencies are used.
    ///
    /// # Errors
    /// rathole cannot be built.
    pub(crate) fn rathole(&self) -> anyhow::Result<PathBuf> {
        let root = self.out.join(format!("rathole-{RATHOLE}"));
        let program = root.join("bin/rathole");
        if program.is_file() {
            return Ok(program);
        }
        eprintln!("perf: building rathole {RATHOLE}, once");
        let mut install = self.workspace.cargo(&["install", "rathole", "--quiet"]);
        install
            .args(["--version", RATHOLE, "--no-default-features"])
            .args(["--features", "server,client,tls"])
            .arg("--root")
            .arg(&root)
            .arg("--target-dir")
            .arg(root.join("build"));
        output_of(&mut install, BUILD_LIMIT).context("rathole does not build")?;
        // Half a gigabyte that is not needed again; remains of it do no harm.
        fs::remove_dir_all(root.join("build")).ok();
        Ok(program)
    }

    /// Builds a release binary of a package in `tree`, and returns cargo's path of it.
    ///
    /// # Errors
    /// The package does not build.
    pub(crate) fn release(&self, tree: &Workspace, package: &str) -> anyhow::Result<PathBuf> {
        // The same command as in the README: with `--package`, dependencies would be rebuilt with other features.
        let mut build = tree.cargo(&["build", "--release", "--quiet", "--bin", package]);
        // One target folder for all trees, so that third-party packages are built once.
        let target = self.workspace.target();
        build.env("CARGO_TARGET_DIR", &target);
        run_command(&mut build, BUILD_LIMIT)?;
        Ok(target.join("release").join(package))
    }

    /// Builds a package of this tree and copies the binary: a later build must not replace a running program.
    fn kept(&self, package: &str) -> anyhow::Result<PathBuf> {
        let program = self.release(&self.workspace, package)?;
        let to = self.out.join("bin").join(package);
        // A running program cannot be overwritten, but its file can be unlinked.
        fs::remove_file(&to).ok();
        fs::copy(&program, &to).with_context(|| format!("copying {}", program.display()))?;
        Ok(to)
    }

    fn go_build(&self, folder: &str, package: &str, name: &str) -> anyhow::Result<PathBuf> {
        let to = self.out.join("bin").join(name);
        let mut build = go().with_context(|| format!("{name} is built by Go"))?;
        build
            // The tag is for the tunnel that the load tool's client library can use again.
            .args(["build", "-trimpath", "-tags=reusable", "-o"])
            .arg(&to)
            .arg(package)
            .current_dir(self.workspace.path(folder))
            .env("CGO_ENABLED", "0")
            .env("GOWORK", "off");
        run_command(&mut build, BUILD_LIMIT)
            .with_context(|| format!("building {name}, which takes Go 1.26 or newer"))?;
        Ok(to)
    }
}
