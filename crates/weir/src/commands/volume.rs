//! `weir volume`

use weir_node::api::{
    ApiError, ApiErrorKind, CreateVolume, DeleteVolume, DeletedVolume, DiskView, VolumeView, Volumes,
};

use super::confirm::confirm;
use super::disk;
use crate::cli::VolumeCommand;
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{list, print, table};

/// A volume and its disks.
#[derive(serde::Serialize)]
#[serde(tag = "schema", rename = "weir.volume-with-disks/1")]
struct Shown {
    volume: VolumeView,
    disks: Vec<DiskView>,
}

/// Executes a `weir volume` command.
pub fn run(global: &Global, command: VolumeCommand) -> Result<(), Failure> {
    let client = any_node(global)?;
    match command {
        VolumeCommand::Create { name, path, kind } => {
            // Nodes have working directories of their own.
            let path = std::path::absolute(path)?;
            let volume = client.create_volume(&CreateVolume { name, kind, path })?;
            print(global.output, &volume, show)
        }
        VolumeCommand::List => {
            print(global.output, &Volumes { volumes: client.volumes()? }, |Volumes { volumes }| {
                let row = |volume: &VolumeView| {
                    vec![
                        volume.name.clone(),
                        volume.kind.clone(),
                        volume.disks.to_string(),
                        volume.path.display().to_string(),
                    ]
                };
                table(&["VOLUME", "KIND", "DISKS", "PATH"], &[2], volumes.iter().map(row))
            })
        }
        VolumeCommand::Show { name } => {
            let volumes = client.volumes()?;
            let Some(volume) = volumes.into_iter().find(|volume| volume.name == name) else {
                let error = ApiError::new(ApiErrorKind::NotFound, format!("there is no volume {name}"));
                return Err(error.hint("`weir volume list` shows those that there are").into());
            };
            let disks: Vec<_> = client.disks()?.into_iter().filter(|disk| disk.volume == name).collect();
            print(global.output, &Shown { volume, disks }, |Shown { volume, disks }| {
                format!("{}\n\n{}", show(volume), disk::rows(disks))
            })
        }
        VolumeCommand::Delete { name, dry_run, yes } => {
            if !dry_run && !yes {
                let would = client.delete_volume(&name, &DeleteVolume { dry_run: true })?;
                confirm(&deleted(&would), &name)?;
            }
            print(global.output, &client.delete_volume(&name, &DeleteVolume { dry_run })?, deleted)
        }
    }
}

fn deleted(volume: &DeletedVolume) -> String {
    let verb = if volume.done { "deleted" } else { "would delete" };
    format!("{verb} volume {}; its directory {} stays", volume.volume, volume.path.display())
}

fn show(volume: &VolumeView) -> String {
    list(&[
        ("volume", volume.name.clone()),
        ("kind", volume.kind.clone()),
        ("path", volume.path.display().to_string()),
        ("disks", volume.disks.to_string()),
    ])
}
