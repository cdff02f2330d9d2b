//! Runs the images as a cluster does: unpacked by umoci, each in a read-only root of its own, as a user without rights and
//! under the seccomp profile, with certificates and sockets in volumes. `image-mounts.sh` makes all mounts.
//!
//! Programs of another processor run in an emulator, without the profile: its list has what Adit calls, not what the emulator
//! does.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::confined::{Container, ensure_confined};
use super::tunnel::{self, Place};
use super::{Arch, IMAGES, Release, Site, TOOL, USER};
use crate::steps::{run_command, stdout_of};
use crate::workspace::{Workspace, fresh};

/// Longest time for everything.
const TRIAL: Duration = Duration::from_secs(10 * 60);
/// Volumes outside of roots, and in a root those for certificates and sockets.
const VOLUMES: &str = "/mnt/volumes";
const CERTIFICATES: &str = "/etc/adit";
const SOCKETS: &str = "/run/adit";
/// Where the emulator is in a root, if there is one.
const EMULATOR: &str = "/dev/emulator";

/// Images by their tags, with their entry points. The last one has a shell of the host's processor.
const TAGS: &[(&str, &str)] = &[
    ("adit", "/adit"),
    ("proxy-server", "/proxy-server"),
    ("proxy-agent", "/proxy-agent"),
    (SHELL, "/adit"),
];
const SHELL: &str = "adit-shell";

/// A server and an agent that are tried together: their images, and what is started in them.
struct Pair {
    name: &'static str,
    server: (&'static str, &'static [&'static str]),
    agent: (&'static str, &'static [&'static str]),
    is_compat: bool,
}

const PAIRS: &[Pair] = &[
    Pair {
        name: "native flags",
        server: ("adit", &["/adit", "server"]),
        agent: ("adit", &["/adit", "agent"]),
        is_compat: false,
    },
    Pair {
        name: "upstream's flags",
        server: ("proxy-server", &["/proxy-server"]),
        agent: ("proxy-agent", &["/proxy-agent"]),
        is_compat: true,
    },
];

/// What the second part is told, which runs in the mount namespace.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder with an unpacked image by tag.
    #[arg(long)]
    images: PathBuf,
    #[arg(long)]
    arch: Arch,
}

/// Unpacks all images, and runs them.
///
/// # Errors
/// An image is not what it is to be, or does not work.
pub(super) fn run(
    site: &Site<'_>,
    release: &Release,
    arch: Arch,
    trial: &Path,
) -> anyhow::Result<()> {
    let images = trial.join("images");
    fresh(&images)?;
    let layout = images.join("layout");
    fs::create_dir_all(&layout)?;
    let mut tar = Command::new("tar");
    tar.arg("--extract")
        .arg("--file")
        .arg(site.out.join(release.name(arch, IMAGES)));
    run_command(tar.arg("--directory").arg(&layout), TOOL)?;
    check_processor(&layout, arch)?;
    for (tag, entrypoint) in TAGS {
        if *tag == SHELL && !arch.is_of_host() {
            continue;
        }
        let bundle = images.join(tag);
        let mut umoci = Command::new("umoci");
        umoci
            .args(["unpack", "--image"])
            .arg(format!("{}:{tag}", layout.display()));
        run_command(umoci.arg(&bundle).stdout(Stdio::null()), TOOL)?;
        let process = &read(&bundle.join("config.json"))?["process"];
        ensure!(
            process["args"][0] == *entrypoint
                && process["user"]["uid"] == USER
                && process["user"]["gid"] == USER,
            "the entry point of {tag} is {}, its user {}",
            process["args"],
            process["user"]
        );
        let mode = fs::metadata(bundle.join("rootfs"))?.permissions().mode();
        ensure!(mode & 0o005 == 0o005, "the root of {tag} is closed");
    }
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--propagation=private"]);
    let mounts = site.script("image-mounts", release, arch);
    unshare
        .arg(mounts.get_program())
        .args(mounts.get_args())
        .env("USER_ID", USER.to_string());
    unshare
        .arg(&images)
        .arg(arch.emulator().unwrap_or_default());
    unshare.arg(std::env::current_exe()?).arg("image-trial");
    unshare
        .arg("--images")
        .arg(&images)
        .args(["--arch", arch.name()]);
    run_command(&mut unshare, TRIAL)?;
    fs::remove_dir_all(&images)?;
    Ok(())
}

fn read(file: &Path) -> anyhow::Result<Value> {
    let text = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    Ok(serde_json::from_slice(&text)?)
}

/// Checks the processor that an OCI layout names, in its index and in the configuration of each image.
fn check_processor(layout: &Path, arch: Arch) -> anyhow::Result<()> {
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap_or_default();
        read(&layout.join("blobs").join(digest.replace(':', "/")))
    };
    let index = read(&layout.join("index.json"))?;
    let entries = index["manifests"].as_array();
    for entry in entries.context("an index has manifests")? {
        let config = blob(&blob(entry)?["config"])?;
        for named in [&entry["platform"]["architecture"], &config["architecture"]] {
            ensure!(
                named == arch.name(),
                "an image for {} names the processor {named}",
                arch.name()
            );
        }
    }
    Ok(())
}

/// The second part.
///
/// # Errors
/// As [`run`].
pub(crate) fn inside(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let emulator = args
        .arch
        .emulator()
        .map(|_name| Path::new(EMULATOR).to_path_buf());
    let container = |tag: &str, profile: Option<&str>| Container {
        root: args.images.join(tag).join("rootfs"),
        user: USER,
        profile: profile
            .filter(|_| emulator.is_none())
            .map(|name| workspace.path(&format!("deploy/seccomp/{name}.json"))),
        emulator: emulator.clone(),
    };
    let with = |container: Container, first: &'static [&'static str]| {
        move |args: &[&str]| container.command(&[first, args].concat())
    };
    let volumes = [CERTIFICATES, SOCKETS].map(|volume| format!("{VOLUMES}{volume}"));
    for pair in PAIRS {
        // The profiles are for server and agent: neither makes a folder or starts a process.
        let pki = container("adit", None);
        let times = tunnel::run(&Place {
            pki: &with(pki, &["/adit", "pki"]),
            server: &with(container(pair.server.0, Some("server")), pair.server.1),
            agent: &with(container(pair.agent.0, Some("agent")), pair.agent.1),
            certificates: PathBuf::from(CERTIFICATES),
            sockets: (PathBuf::from(SOCKETS), PathBuf::from(&volumes[1])),
            is_compat: pair.is_compat,
            inspect: &|process| ensure_confined(process, USER, emulator.is_none()),
        })
        .with_context(|| format!("images with {}", pair.name))?;
        println!("{}, {}: {times}", args.arch.name(), pair.name);
        // What is in the volumes, but not the volumes.
        let mut find = Command::new("find");
        run_command(
            find.args(&volumes).args(["-mindepth", "1", "-delete"]),
            TOOL,
        )?;
    }
    if args.images.join(SHELL).is_dir() {
        hook(&container(SHELL, None))?;
    }
    Ok(())
}

/// The image with a shell runs what a pod runs before it stops, and has the names that platforms look for.
fn hook(container: &Container) -> anyhow::Result<()> {
    let script = "sleep 0.1 && for name in adit proxy-server proxy-agent; do \
                  for folder in '' /bin /usr/bin; do $folder/$name --help >/dev/null && echo $folder/$name || exit 1; done; done";
    let said = stdout_of(&mut container.command(&["/bin/sh", "-c", script])?, TOOL)?;
    ensure!(
        said.lines().count() == 9,
        "nine names of the binary are wanted: {said}"
    );
    Ok(())
}
