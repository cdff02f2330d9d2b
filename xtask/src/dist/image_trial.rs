//! Runs the images as a cluster does: unpacked by umoci, each in a read-only root of its own, as a user without rights and
//! under the seccomp profile, with certificates and sockets in volumes.
//!
//! A mount namespace holds all mounts, and ends with the trial. Programs of another processor run in an emulator, without the
//! profile: its list has what Adit calls, not what the emulator does.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::confined::{Container, ensure_confined};
use super::image::{self, IMAGES, USER};
use super::tunnel::{self, Place};
use super::{Arch, Release, TOOL, tool_path};
use crate::steps::{run_command, stdout_of};
use crate::workspace::{Workspace, fresh};

/// Longest time for everything.
const TRIAL: Duration = Duration::from_secs(10 * 60);
/// Volumes: where they are in a root.
const CERTIFICATES: &str = "etc/adit";
const SOCKETS: &str = "run/adit";

/// What runtimes put into /dev that a program without a terminal may need.
const DEVICES: &[&str] = &["null", "random", "urandom", "zero"];
/// Where the emulator is in a root, if there is one: beside devices, as nothing of the image is there.
const EMULATOR: &str = "dev/emulator";

/// An image by its tag, and what is started in it.
type Started = (&'static str, &'static [&'static str]);

/// A server and an agent that are tried together.
struct Pair {
    name: &'static str,
    server: Started,
    agent: Started,
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
    workspace: &Workspace,
    release: &Release,
    arch: Arch,
    out: &Path,
    trial: &Path,
) -> anyhow::Result<()> {
    let images = trial.join("images");
    fresh(&images)?;
    let layout = images.join("layout");
    fs::create_dir_all(&layout)?;
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file");
    tar.arg(out.join(release.name(arch, image::ENDING)));
    run_command(tar.arg("--directory").arg(&layout), TOOL)?;
    check_processor(&layout, arch)?;
    for image in IMAGES.iter().filter(|image| image::is_made(image, arch)) {
        let bundle = images.join(image.tag);
        let mut umoci = Command::new("umoci");
        umoci
            .args(["unpack", "--image"])
            .arg(format!("{}:{}", layout.display(), image.tag))
            .arg(&bundle)
            .stdout(Stdio::null());
        run_command(&mut umoci, TOOL)?;
        let config: Value = serde_json::from_slice(&fs::read(bundle.join("config.json"))?)?;
        let process = &config["process"];
        ensure!(
            process["args"][0] == image.entrypoint,
            "the entry point of {} is {}",
            image.tag,
            process["args"]
        );
        ensure!(
            process["user"]["uid"] == USER && process["user"]["gid"] == USER,
            "the user of {} is {}",
            image.tag,
            process["user"]
        );
        let root = bundle.join("rootfs");
        let mode = fs::metadata(&root)?.permissions().mode();
        ensure!(mode & 0o005 == 0o005, "{} is closed", root.display());
    }
    let mut unshare = workspace.command("unshare");
    unshare
        .args(["--mount", "--propagation=private"])
        .arg(std::env::current_exe()?)
        .arg("image-trial")
        .arg("--images")
        .arg(fs::canonicalize(&images)?)
        .args(["--arch", arch.name()]);
    run_command(&mut unshare, TRIAL)?;
    fs::remove_dir_all(&images)?;
    Ok(())
}

/// Checks the processor that an OCI layout names, in its index and in the configuration of each image.
fn check_processor(layout: &Path, arch: Arch) -> anyhow::Result<()> {
    let json = |file: &Path| -> anyhow::Result<Value> {
        let text = fs::read(file).with_context(|| format!("read {}", file.display()))?;
        Ok(serde_json::from_slice(&text)?)
    };
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap_or_default();
        json(&layout.join("blobs").join(digest.replace(':', "/")))
    };
    let index = json(&layout.join("index.json"))?;
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
    // Below a short path, as the path of a socket has 107 bytes at most; nobody else sees it.
    let base = Path::new("/mnt");
    mount(&["-t", "tmpfs", "-o", "mode=0755", "tmpfs"], base)?;
    let volumes = base.join("volumes");
    let emulator = match args.arch.emulator() {
        Some(name) => Some(tool_path(&name).with_context(|| format!("find {name}"))?),
        None => None,
    };
    for volume in [CERTIFICATES, SOCKETS] {
        let volume = volumes.join(volume);
        fs::create_dir_all(&volume)?;
        chown(&volume, Some(USER), Some(USER))?;
        fs::set_permissions(&volume, fs::Permissions::from_mode(0o700))?;
    }
    for image in IMAGES {
        let root = args.images.join(image.tag).join("rootfs");
        if !root.is_dir() {
            continue;
        }
        for folder in [CERTIFICATES, SOCKETS, "proc", "dev"] {
            fs::create_dir_all(root.join(folder))?;
        }
        mount(&["--bind", text(&root)?], &root)?;
        mount(&["-o", "remount,bind,ro"], &root)?;
        for volume in [CERTIFICATES, SOCKETS] {
            let from = volumes.join(volume);
            mount(&["--bind", text(&from)?], &root.join(volume))?;
        }
        mount(&["-t", "proc", "proc"], &root.join("proc"))?;
        mount(
            &["-t", "tmpfs", "-o", "mode=0755", "tmpfs"],
            &root.join("dev"),
        )?;
        for device in DEVICES {
            let file = root.join("dev").join(device);
            fs::write(&file, "")?;
            mount(&["--bind", &format!("/dev/{device}")], &file)?;
        }
        if let Some(emulator) = &emulator {
            let file = root.join(EMULATOR);
            fs::write(&file, "")?;
            mount(&["--bind", text(emulator)?], &file)?;
        }
        let shown = fs::write(root.join("written"), "");
        ensure!(shown.is_err(), "{} is not read-only", root.display());
    }
    let container = |tag: &str, profile: Option<&str>| Container {
        root: args.images.join(tag).join("rootfs"),
        user: USER,
        profile: profile
            .filter(|_| emulator.is_none())
            .map(|name| workspace.path(&format!("deploy/seccomp/{name}.json"))),
        emulator: emulator.as_ref().map(|_| Path::new("/").join(EMULATOR)),
    };
    let with = |container: Container, first: &'static [&'static str]| {
        move |args: &[&str]| container.command(&[first, args].concat())
    };
    for pair in PAIRS {
        // The profiles are for server and agent: neither makes a folder or starts a process.
        let pki = container("adit", None);
        let times = tunnel::run(&Place {
            pki: &with(pki, &["/adit", "pki"]),
            server: &with(container(pair.server.0, Some("server")), pair.server.1),
            agent: &with(container(pair.agent.0, Some("agent")), pair.agent.1),
            certificates: Path::new("/").join(CERTIFICATES),
            sockets: (Path::new("/").join(SOCKETS), volumes.join(SOCKETS)),
            is_compat: pair.is_compat,
            inspect: &|process| ensure_confined(process, USER, emulator.is_none()),
        })
        .with_context(|| format!("images with {}", pair.name))?;
        println!("{}, {}: {times}", args.arch.name(), pair.name);
        for volume in [CERTIFICATES, SOCKETS] {
            for entry in fs::read_dir(volumes.join(volume))? {
                let path = entry?.path();
                if path.is_dir() {
                    fs::remove_dir_all(path)?;
                } else {
                    fs::remove_file(path)?;
                }
            }
        }
    }
    if args.images.join("adit-shell").is_dir() {
        hook(&container("adit-shell", None))?;
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

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().context("a path of UTF-8")
}

fn mount(args: &[&str], on: &Path) -> anyhow::Result<()> {
    let mut mount = Command::new("mount");
    run_command(mount.args(args).arg(on), TOOL)
}
