"""Tokens predicted by teacher forcing are the argmax of the whole model."""

from talker import full_pass, padded

from flaxformer_mt.decoding.scoring.teacher_forcing import predict_tokens


def test_predictions_are_the_argmax_of_each_pair_alone(talker):
    sources, targets = (
        [[*talker.tokenizers.source.encode([text])[0], talker.model.eos_id] for text in texts]
        for texts in (
            ["ein Hund bellt", "die", "zwei Hunde"],
            ["die Wiese", "ein Hund bellt", "die"],
        )
    )
    found = predict_tokens(talker.params, talker.model, talker.config.decode, sources, targets)
    for source, target, predicted in zip(sources, targets, found, strict=True):
        inputs = [talker.model.bos_id, *target[:-1]]
        logits = full_pass(talker.params, padded(source), padded(inputs), model=talker.model)
        assert predicted == logits[0, : len(target)].argmax(axis=-1).tolist()
