"""Data sets of TensorFlow Datasets with a feature `Translation`, written without TensorFlow."""

import contextlib

NAME = "parallel_text"


def write(folder, languages=("en", "de"), **splits):
    """Writes the pairs of each split to a folder, in one file each."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter

    folder.mkdir(parents=True)
    features = tfds.features.Translation(sorted(languages))
    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())

    def template(**facts):
        return tfds.core.ShardedFileTemplate(
            data_dir=folder, dataset_name=NAME, filetype_suffix="array_record", **facts
        )

    infos = []
    for split, pairs in splits.items():
        names = template(split=split)
        path = str(names.sharded_filepath(shard_index=0, num_shards=1))
        with contextlib.closing(ArrayRecordWriter(path, "group_size:1")) as writer:
            for pair in pairs:
                texts = features.encode_example(dict(zip(languages, pair, strict=True)))
                example = serializer.get_tf_example(texts)
                writer.write(example.SerializeToString(deterministic=True))
        infos.append(
            tfds.core.SplitInfo(
                name=split, shard_lengths=[len(pairs)], num_bytes=1, filename_template=names
            )
        )
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        features=features,
        split_infos=infos,
        filename_template=template(),
        version="1.0.0",
        check_data=False,
    )
